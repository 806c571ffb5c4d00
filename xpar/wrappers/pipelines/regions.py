"""Which part of a denoiser's output belongs to which patch.

Found by probing: the head is run on hidden tokens of which one patch is NaN, and what comes out as NaN depends on that
patch. So the layout (packed, unpatchified, video, several outputs) need not be known.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from xpar.errors import UnsupportedError
from xpar.wrappers.models.plan import tensors_of


class Regions:
    """For each output tensor, the patch that owns each element.

    Args:
        owners: one int16 tensor per output tensor, of its shape, with patch numbers.
        patches: number of patches M.
    """

    def __init__(self, owners: Sequence[torch.Tensor], patches: int) -> None:
        self.owners, self.patches = list(owners), patches
        self._indices = [
            [torch.nonzero(owner.reshape(-1) == patch).squeeze(1) for owner in self.owners] for patch in range(patches)
        ]
        self._masks: dict[torch.Size, torch.Tensor] = {}

    @classmethod
    def probe(cls, run: Callable[[int], Any], patches: int) -> "Regions":
        """Find the regions.

        Args:
            run: runs the head with NaN in one patch and returns the transformer's output.
            patches: number of patches M.

        Raises:
            UnsupportedError: the regions overlap or leave something out, so the model mixes tokens after its blocks
                and cannot be run patch by patch.
        """
        touched = [[torch.isnan(x) for x in tensors_of(run(patch))] for patch in range(patches)]
        owners = []
        for of_tensor in zip(*touched, strict=True):
            stacked = torch.stack(of_tensor)
            if not bool((stacked.sum(0) == 1).all()):
                raise UnsupportedError(
                    "the model mixes tokens of different patches after its blocks, so num_patches > 1 would be wrong; "
                    "use num_patches=1, or ulysses_degree or ring_degree"
                )
            owner = stacked.to(torch.int8).argmax(0).to(torch.int16)
            if not bool((owner == owner[:1]).all()):
                raise UnsupportedError("the model lays out the rows of a batch differently; use num_patches=1")
            owners.append(owner)
        return cls(owners, patches)

    def take(self, outputs: Sequence[torch.Tensor], patch: int) -> torch.Tensor:
        """The elements of one patch, packed into one flat tensor."""
        pieces = zip(outputs, self._indices[patch], strict=True)
        return torch.cat([x.reshape(-1).index_select(0, index) for x, index in pieces])

    def put(self, outputs: Sequence[torch.Tensor], patch: int, values: torch.Tensor) -> None:
        """Write the elements of one patch into contiguous output tensors."""
        indices = self._indices[patch]
        parts = values.split([index.numel() for index in indices])
        for x, index, part in zip(outputs, indices, parts, strict=True):
            x.view(-1).index_copy_(0, index, part)

    def size(self, patch: int) -> int:
        """Number of elements of one patch."""
        return sum(index.numel() for index in self._indices[patch])

    def mask(self, latents: torch.Tensor, patch: int) -> torch.Tensor:
        """Which elements of the latents belong to a patch, from the first output tensor; the same in every row.

        Latents may be a leading part of the output: the generated tokens before those of a reference picture, the
        channels before a predicted variance. Their rows may be fewer (the first half of a guidance batch) or more (the
        pictures of other ranks) than those that were probed.

        Returns:
            Boolean tensor with one row, which broadcasts over the latents.

        Raises:
            UnsupportedError: the latents are no leading part of the output.
        """
        if latents.shape not in self._masks:
            owner = self.owners[0][:1]
            sizes = latents.shape[1:]
            if latents.ndim != owner.ndim or any(n > m for n, m in zip(sizes, owner.shape[1:], strict=True)):
                raise UnsupportedError(
                    f"scheduler.step was given latents of shape {tuple(latents.shape)}, which are no leading part of "
                    f"the denoiser's output of shape {tuple(self.owners[0].shape)}; num_patches > 1 is not supported "
                    "for this pipeline"
                )
            part = owner[(slice(None), *(slice(0, n) for n in sizes))]
            self._masks[latents.shape] = torch.stack([part == index for index in range(self.patches)])
        return self._masks[latents.shape][patch]
