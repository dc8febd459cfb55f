"""Results as datasets on the Hugging Face Hub."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ropelens.errors import BadArgument, explained
from ropelens.runtime.folder import RECORD, write_whole
from ropelens.runtime.run_record import read_record

PREFIX = "hf://"
# Pages and tables are not read, so they are not fetched.
NUMBERS = (RECORD, "profile.nc", "truncation.nc", "reach.nc", "comparison.nc")


def upload(
    folder: Path,
    repo: str,
    record: Mapping[str, Any],
    findings: Sequence[str],
    *,
    private: bool,
) -> str:
    """Write a dataset card to `folder`, and upload it in one commit; return the address."""
    from huggingface_hub import HfApi  # slow

    api, of_repo = HfApi(), cast(Any, {"repo_id": repo, "repo_type": "dataset"})
    write_whole(folder / "README.md", card(repo, record, findings))
    hint = "a token with write access (hf auth login), and a network (HF_HUB_OFFLINE=0)"
    with explained(
        f"The dataset {repo} could not be uploaded.", hint, error=BadArgument
    ):
        address = api.create_repo(**of_repo, private=private, exist_ok=True)
        info = api.dataset_info(repo)
        files = {file.rfilename for file in info.siblings or ()} - {".gitattributes"}
        foreign = "it holds files that ropelens did not write" * bool(
            files and RECORD not in files
        )
        public = "it is public, and private=True" * (private and not info.private)
        if fault := public or foreign:
            what = f"The dataset {repo} exists already: {fault}."
            raise BadArgument(
                what, hint="another name, or private=False for a public dataset"
            )
        old: Any = {
            "delete_patterns": [*NUMBERS, "*.csv"]
        }  # an earlier sweep must not remain
        api.upload_folder(**of_repo, folder_path=folder, **old)
    return str(address)


def download(address: str) -> Path:
    """Fetch the numbers of hf://datasets/NAME/DATASET[@REVISION]; return their folder."""
    from huggingface_hub import snapshot_download  # slow
    from huggingface_hub.utils import parse_hf_uri

    hint = "hf://datasets/NAME/DATASET, uploaded by Analysis.push_to_hub"
    with explained(f"{address} could not be read.", hint, error=BadArgument):
        uri = parse_hf_uri(address)
        patterns: Any = {"allow_patterns": [*NUMBERS], "revision": uri.revision}
        folder = Path(snapshot_download(uri.id, repo_type=uri.type, **patterns))
        if not read_record(folder / uri.path_in_repo):
            raise ValueError("it has no run.json of ropelens")
    return folder


def card(repo: str, record: Mapping[str, Any], findings: Sequence[str]) -> str:
    """The dataset card: model, text, versions and findings, without contents of the text."""
    from huggingface_hub import DatasetCardData

    model, text = record.get("model", {}), record.get("text", {})
    facts = {
        f"model {name}": model.get(name) for name in ("name", "revision", "fingerprint")
    }
    facts |= {f"text {name}": text.get(name) for name in ("source", "fingerprint")}
    facts |= {n: record.get(n) for n in ("context", "tokens")} | record.get(
        "versions", {}
    )
    rows = [
        f"| {escape(name)} | {escape(fact)} |" for name, fact in facts.items() if fact
    ]
    use = f'`ropelens.open("hf://datasets/{repo}")` reads this analysis.'
    lines = [
        f"# An analysis by ropelens\n\n{use}\n",
        *[f"- {escape(x)}" for x in findings],
        "",
    ]
    head = DatasetCardData(tags=["ropelens", "rope", "interpretability"]).to_yaml()
    return "\n".join(["---", head, "---", *lines, "| | |", "|---|---|", *rows, ""])


def escape(text: object) -> str:
    """`text` on one line. Characters with a meaning in Markdown or HTML become entities."""
    line = " ".join(str(text).split())
    return re.sub(r"[^\w .,;()%+/-]", lambda match: f"&#{ord(match[0])};", line)
