"""Plan of FluxTransformer2DModel (FLUX.1): joint attention of text and image, double then single blocks."""

from xpar.wrappers.models.plan import ModelPlan, Tokens

TEXT_THEN_IMAGE = ("encoder_hidden_states", "hidden_states")

FLUX = ModelPlan(
    blocks=("transformer_blocks", "single_transformer_blocks"),
    streams=("hidden_states", "encoder_hidden_states"),
    returns=TEXT_THEN_IMAGE,
    attention={"attn": TEXT_THEN_IMAGE},
    per_token={"image_rotary_emb": Tokens(dim=0, streams=TEXT_THEN_IMAGE)},
    inputs={
        "controlnet_block_samples": Tokens(dim=1, streams=("hidden_states",)),
        "controlnet_single_block_samples": Tokens(dim=1, streams=("hidden_states",)),
    },
    head="norm_out",
    batch=(
        "hidden_states",
        "encoder_hidden_states",
        "pooled_projections",
        "timestep",
        "guidance",
        "joint_attention_kwargs",
        "controlnet_block_samples",
        "controlnet_single_block_samples",
    ),
    unbatched=("img_ids", "txt_ids"),
)
