"""The papers that make the claims of the ledger."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper. `doi` is "not stated" if this project does not know one."""

    citation: str
    doi: str


BARBERO = Paper(
    citation="Barbero et al. 2024, arXiv 2410.06205",
    doi="10.48550/arXiv.2410.06205",
)
OKA = Paper(
    citation="Oka et al. 2026, ICLR",
    doi="not stated",
)
JIN = Paper(
    citation="Jin et al. 2025, arXiv 2502.01563",
    doi="10.48550/arXiv.2502.01563",
)
JONASSON = Paper(
    citation="Jonasson 2025, arXiv 2503.01832",
    doi="10.48550/arXiv.2503.01832",
)
URRUTIA = Paper(
    citation="Urrutia et al. 2025, arXiv 2511.11579",
    doi="10.48550/arXiv.2511.11579",
)
TRIATTENTION = Paper(
    citation="TriAttention 2026, arXiv 2604.04921",
    doi="10.48550/arXiv.2604.04921",
)
SINKS = Paper(
    citation="arXiv 2603.05498",
    doi="10.48550/arXiv.2603.05498",
)
RETRIEVAL = Paper(
    citation="arXiv 2606.21249",
    doi="10.48550/arXiv.2606.21249",
)
DU = Paper(
    citation="Du et al. 2026, arXiv 2605.15514",
    doi="10.48550/arXiv.2605.15514",
)
SU = Paper(
    citation="Su et al. 2021, arXiv 2104.09864",
    doi="10.48550/arXiv.2104.09864",
)
CHIANG = Paper(
    citation="Chiang and Yogatama 2025, arXiv 2502.11276",
    doi="10.48550/arXiv.2502.11276",
)
