"""A wrapped pipeline on each of several groups of Ray actors; needs the extra `xpar[ray]`.

    ray.init()
    with PipelineGroups(load, EngineConfig(ulysses_degree=2), groups=4, num_gpus=1) as groups:
        outputs = groups.map({"prompt": prompt} for prompt in prompts)

Importing this starts nothing: neither Ray nor torch.distributed.
"""

try:
    import ray as _  # noqa: F401 - only to say early, and in plain words, that it is missing
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "xpar.ray needs Ray, which is not installed: pip install 'xpar[ray]'", name="ray"
    ) from error

from xpar.ray.actor_group import Member
from xpar.ray.pipeline_groups import PipelineGroups

__all__ = ["Member", "PipelineGroups"]
