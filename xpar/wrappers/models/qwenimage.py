"""Plan of QwenImageTransformer2DModel: text-first joint attention with a text mask, separate rotary tables, and, for
edits, per-token modulation."""

from xpar.wrappers.models.plan import ModelPlan, Tokens

IMAGE = ("hidden_states",)
TEXT = ("encoder_hidden_states",)

QWEN_IMAGE = ModelPlan(
    blocks=("transformer_blocks",),
    streams=("hidden_states", "encoder_hidden_states"),
    returns=("encoder_hidden_states", "hidden_states"),
    attention={"attn": TEXT + IMAGE},
    per_token={
        "image_rotary_emb": (Tokens(dim=0, streams=IMAGE), Tokens(dim=0, streams=TEXT)),
        "encoder_hidden_states_mask": Tokens(dim=1, streams=TEXT),
        "modulate_index": Tokens(dim=1, streams=IMAGE),
    },
    masks={"encoder_hidden_states_mask": "encoder_hidden_states"},
    inputs={"controlnet_block_samples": Tokens(dim=1, streams=IMAGE)},
    head="norm_out",
    batch=(
        "hidden_states",
        "encoder_hidden_states",
        "encoder_hidden_states_mask",
        "timestep",
        "img_shapes",
        "guidance",
        "attention_kwargs",
        "controlnet_block_samples",
        "additional_t_cond",
    ),
)
