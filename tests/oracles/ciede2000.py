"""Distance of two colours as people see it: CIEDE2000.

Source: Sharma, Wu and Dalal 2005, "The CIEDE2000 Color-Difference Formula".
"""

from dataclasses import dataclass

import numpy as np

LARGE_CHROMA = 25.0**7


@dataclass(frozen=True)
class Pair:
    """Means and differences of lightness, chroma and hue (degrees) of two colours."""

    mean_light: float
    mean_chroma: float
    mean_hue: float
    light: float
    chroma: float
    hue: float


def ciede2000(one: np.ndarray, other: np.ndarray) -> float:
    """CIEDE2000 distance of two colours in CIELAB."""
    pair = _pair(one, other)
    from_middle = (pair.mean_light - 50) ** 2
    light_scale = 1 + 0.015 * from_middle / np.sqrt(20 + from_middle)
    chroma_scale = 1 + 0.045 * pair.mean_chroma
    hue_scale = 1 + 0.015 * pair.mean_chroma * _hue_weight(pair.mean_hue)
    light = pair.light / light_scale
    chroma = pair.chroma / chroma_scale
    hue = pair.hue / hue_scale
    rotation = _rotation(pair) * chroma * hue
    return float(np.sqrt(light**2 + chroma**2 + hue**2 + rotation))


def _pair(one: np.ndarray, other: np.ndarray) -> Pair:
    both = np.array([one, other], dtype=float)
    mean_chroma = np.hypot(both[:, 1], both[:, 2]).mean()
    a = both[:, 1] * (1.5 - 0.5 * _share_of_large(mean_chroma))
    b = both[:, 2]
    chroma = np.hypot(a, b)
    hue = np.degrees(np.arctan2(b, a)) % 360
    turn = (hue[1] - hue[0] + 180) % 360 - 180
    return Pair(
        mean_light=both[:, 0].mean(),
        mean_chroma=chroma.mean(),
        mean_hue=(hue[0] + turn / 2) % 360,
        light=both[1, 0] - both[0, 0],
        chroma=chroma[1] - chroma[0],
        hue=2 * np.sqrt(chroma.prod()) * np.sin(np.radians(turn / 2)),
    )


def _share_of_large(chroma: float) -> float:
    power = chroma**7
    return float(np.sqrt(power / (power + LARGE_CHROMA)))


def _hue_weight(hue: float) -> float:
    cosines = [
        -0.17 * np.cos(np.radians(hue - 30)),
        0.24 * np.cos(np.radians(2 * hue)),
        0.32 * np.cos(np.radians(3 * hue + 6)),
        -0.20 * np.cos(np.radians(4 * hue - 63)),
    ]
    return 1 + sum(cosines)


def _rotation(pair: Pair) -> float:
    bend = 60 * np.exp(-(((pair.mean_hue - 275) / 25) ** 2))
    return -2 * _share_of_large(pair.mean_chroma) * np.sin(np.radians(bend))
