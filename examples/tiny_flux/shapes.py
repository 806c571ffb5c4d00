"""The drawn pictures tiny-flux learns from: scenes, captions, colours and the left-out combinations.

A scene is one coloured shape at one of five places on a plain background that darkens slightly towards
the bottom. `Scene` holds the four names as table indices, `draw` renders scenes at any size, `caption`
words them, and `is_held_out` marks the combinations that training never sees.
"""

import itertools
import random
from typing import NamedTuple

import torch

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.88, 0.10, 0.12),
    "green": (0.10, 0.60, 0.18),
    "blue": (0.12, 0.22, 0.90),
    "yellow": (0.97, 0.87, 0.08),
    "purple": (0.52, 0.12, 0.70),
    "orange": (0.97, 0.52, 0.05),
    "cyan": (0.05, 0.78, 0.88),
    "pink": (0.98, 0.45, 0.74),
    "brown": (0.45, 0.26, 0.10),
    "gray": (0.50, 0.50, 0.52),
}
BACKGROUNDS: dict[str, tuple[float, float, float]] = {
    "white": (1.00, 1.00, 1.00),
    "black": (0.04, 0.04, 0.06),
    "blue": (0.62, 0.76, 1.00),
    "green": (0.70, 0.95, 0.66),
    "cream": (1.00, 0.90, 0.70),
    "teal": (0.00, 0.34, 0.38),
}
SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "diamond", "ring")
PLACES: dict[str, tuple[float, float]] = {  # centre of the shape as (x, y), in shares of the picture
    "center": (0.5, 0.5),
    "top left": (0.3, 0.3),
    "top right": (0.7, 0.3),
    "bottom left": (0.3, 0.7),
    "bottom right": (0.7, 0.7),
}
CENTRE_SPREAD = 0.03  # range of the centre in each direction, in shares of the picture
RADII = (0.175, 0.205)  # smallest and largest radius likewise
SHADE = 0.10  # how much darker the background is at the bottom edge
HOLD_OUT = 17  # about one combination in this many is left out

_TEMPLATES: tuple[tuple[int, str], ...] = (  # (weight, wording); {s} is "a red circle"
    (34, "{s} on a {b} background at the {p}"),
    (16, "{s} on a {b} background"),
    (10, "{s} at the {p} on a {b} background"),
    (10, "on a {b} background, {s} at the {p}"),
    (10, "at the {p}, {s} on a {b} background"),
    (5, "{cs}, {b} background, {p}"),
    (5, "{cs}, {b} background"),
)
_EMPTY_WEIGHT = 10  # the caption is dropped this often, so that an empty negative prompt has a meaning


class Scene(NamedTuple):
    """One picture's content as indices into COLOURS, SHAPES, BACKGROUNDS and PLACES."""

    colour: int
    shape: int
    background: int
    place: int


def is_held_out(scene: Scene) -> bool:
    """True for the combinations kept for evaluation; depends on nothing but the scene."""
    return (scene.colour * 7 + scene.shape * 3 + scene.background * 5 + scene.place) % HOLD_OUT == 0


def all_scenes(held_out: bool) -> list[Scene]:
    """Every left-out combination, or every combination that training may use."""
    sizes = (len(COLOURS), len(SHAPES), len(BACKGROUNDS), len(PLACES))
    scenes = (Scene(*index) for index in itertools.product(*map(range, sizes)))
    return [scene for scene in scenes if is_held_out(scene) == held_out]


def names(scene: Scene) -> tuple[str, str, str, str]:
    """Colour, shape, background and place in words."""
    return (
        list(COLOURS)[scene.colour],
        SHAPES[scene.shape],
        list(BACKGROUNDS)[scene.background],
        list(PLACES)[scene.place],
    )


def caption(scene: Scene, template: str = _TEMPLATES[0][1]) -> str:
    """The scene in words; without a template the plain full wording."""
    colour, shape, background, place = names(scene)
    article = "an" if colour[0] in "aeiou" else "a"
    return template.format(s=f"{article} {colour} {shape}", cs=f"{colour} {shape}", b=background, p=place)


def random_caption(scene: Scene, rng: random.Random) -> str:
    """The scene in a random wording, now and then without its place, sometimes empty."""
    weights = [weight for weight, _ in _TEMPLATES] + [_EMPTY_WEIGHT]
    choice = rng.choices(range(len(weights)), weights)[0]
    return "" if choice == len(_TEMPLATES) else caption(scene, _TEMPLATES[choice][1])


def all_captions() -> list[str]:
    """Every wording of every combination (used to build the tokenizers)."""
    scenes = all_scenes(False) + all_scenes(True)
    return [caption(scene, template) for scene in scenes for _, template in _TEMPLATES]


def signed_distance(shape: int, dx: torch.Tensor, dy: torch.Tensor, radius: torch.Tensor | float) -> torch.Tensor:
    """Distance to the outline of a shape of the given radius, negative inside; dx, dy from its centre."""
    name = SHAPES[shape]
    if name == "circle":
        return (dx**2 + dy**2).sqrt() - radius
    if name == "square":
        return torch.maximum(dx.abs(), dy.abs()) - 0.88 * radius
    if name == "triangle":
        return torch.maximum(dy - 0.8 * radius, (1.8 * dx.abs() - dy - radius) / 2.06)
    if name == "diamond":
        return (dx.abs() + dy.abs() - 1.25 * radius) / 1.414
    return ((dx**2 + dy**2).sqrt() - 0.85 * radius).abs() - 0.27 * radius


def draw(
    scenes: list[Scene],
    size: int,
    generator: torch.Generator | None = None,
    crop: int | None = None,
) -> torch.Tensor:
    """Render scenes as an [N, 3, size, size] tensor in -1..1, with a little jitter of place and radius.

    With `crop`, a random crop x crop window of each picture is rendered instead, kept near the shape.
    """
    count = len(scenes)
    jitter = torch.rand(count, 5, generator=generator)
    colours = torch.tensor(list(COLOURS.values()))
    backgrounds = torch.tensor(list(BACKGROUNDS.values()))
    places = torch.tensor(list(PLACES.values()))
    centre = places[[scene.place for scene in scenes]] + (jitter[:, :2] - 0.5) * CENTRE_SPREAD
    radius = torch.lerp(*torch.tensor(RADII), jitter[:, 2])
    side = crop or size
    if crop:  # the window's centre lies within about a radius and a half of the shape's
        start = (centre + (jitter[:, 3:] - 0.5) * 3 * radius[:, None]) * size - crop / 2
        start = start.round().clamp(0, size - crop)
    else:
        start = torch.zeros(count, 2)
    steps = torch.arange(side) + 0.5
    x = (start[:, 0, None, None] + steps[None, None, :]) / size
    y = (start[:, 1, None, None] + steps[None, :, None]) / size
    pictures = torch.empty(count, 3, side, side)
    for i, scene in enumerate(scenes):
        dx, dy = torch.broadcast_tensors(x[i] - centre[i, 0], y[i] - centre[i, 1])
        mask = torch.sigmoid(-2.0 * size * signed_distance(scene.shape, dx, dy, radius[i]))
        ground = backgrounds[scene.background][:, None, None] * (1 - SHADE * y[i])
        pictures[i] = mask * colours[scene.colour][:, None, None] + (1 - mask) * ground
    return pictures * 2 - 1
