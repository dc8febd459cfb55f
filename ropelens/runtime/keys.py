"""Keys of saved work: the only check of whether it belongs to the present settings."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ropelens.errors import BadArgument

FIRST_FORMAT = 1  # work has it if its key has no format number


def differences(
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    names: Iterable[str],
    *,
    between: str,
) -> str:
    """List the values of `names` that differ: "steps: 3, now 4" if `between` is ", now "."""
    return "; ".join(
        f"{name}: {str(first.get(name))[:100]}{between}{str(second.get(name))[:100]}"
        for name in names
        if first.get(name) != second.get(name)
    )


@dataclass(frozen=True)
class Key:
    """The `values` that determine the numbers of saved work, and the format of its files.

    Saved work fits a key if it was recorded with the same format and with each of the values.
    It may have been recorded with more values, and with `versions` of more packages: the key
    names the packages on which the numbers depend.
    """

    values: Mapping[str, Any]
    format: int = FIRST_FORMAT

    @property
    def recorded(self) -> dict[str, Any]:
        """The format and the values in JSON, which are saved with the work."""
        whole = {"format": self.format, **self.values}
        return json.loads(json.dumps(whole, default=str))

    @property
    def digest(self) -> str:
        """SHA-256 of the key in hex, which can name a file."""
        text = json.dumps(self.recorded, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def changes(self, saved: Mapping[str, Any]) -> str:
        """List the values of the key that differ in a `saved` key; "" if the work fits."""
        before = {"format": FIRST_FORMAT, **saved}
        after = self.recorded
        packages = after.get("versions")
        recorded = before.get("versions")
        if packages is not None and isinstance(recorded, dict):
            used = {name: recorded[name] for name in recorded if name in packages}
            before["versions"] = used
        return differences(before, after, after, between=", now ")

    def fits(self, saved: Mapping[str, Any]) -> bool:
        """Whether work that was recorded with the `saved` key can be used."""
        return not self.changes(saved)

    def require(self, saved: Mapping[str, Any], *, what: str) -> None:
        """Raise `BadArgument` if `what` was made with another key."""
        if changes := self.changes(saved):
            raise BadArgument(
                f"{what} was made with other settings.",
                seen=changes,
                hint="the same command as before, to resume it; or another folder",
            )
