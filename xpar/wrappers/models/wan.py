"""Plan of WanTransformer3DModel (Wan 2.1, 2.2): self-attention over the video, cross-attention to replicated text and
image context; modulation is per token where timesteps are (2.2 TI2V)."""

from xpar.wrappers.models.plan import ModelPlan, Tokens

VIDEO = ("hidden_states",)

WAN = ModelPlan(
    blocks=("blocks",),
    streams=VIDEO,
    returns=VIDEO,
    attention={"attn1": VIDEO},
    per_token={
        "rotary_emb": Tokens(dim=1, streams=VIDEO),
        "temb": Tokens(dim=1, streams=VIDEO, ndim=4),
    },
    batch=("hidden_states", "timestep", "encoder_hidden_states", "encoder_hidden_states_image", "attention_kwargs"),
)
