"""Plan of SD3Transformer2DModel (SD3, SD3.5): image-first joint attention, image-only dual attention, positions added
before the blocks; the last block returns no text."""

from xpar.wrappers.models.plan import ModelPlan, Tokens

SD3 = ModelPlan(
    blocks=("transformer_blocks",),
    streams=("hidden_states", "encoder_hidden_states"),
    returns=("encoder_hidden_states", "hidden_states"),
    attention={"attn": ("hidden_states", "encoder_hidden_states"), "attn[2]": ("hidden_states",)},
    inputs={"block_controlnet_hidden_states": Tokens(dim=1, streams=("hidden_states",))},
    head="norm_out",  # and not the last block, which skip-layer guidance may skip
    batch=(
        "hidden_states",
        "encoder_hidden_states",
        "pooled_projections",
        "timestep",
        "block_controlnet_hidden_states",
        "joint_attention_kwargs",
    ),
    unbatched=("skip_layers",),
)
