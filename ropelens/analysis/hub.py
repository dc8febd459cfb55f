"""Results as datasets on the Hugging Face Hub."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ropelens.compatibility import parse_dataset
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

    api = HfApi()
    write_whole(folder / "README.md", card(repo, record, findings))
    hint = "a token with write access (hf auth login), and a network (HF_HUB_OFFLINE=0)"
    with explained(
        f"The dataset {repo} could not be uploaded.", hint, error=BadArgument
    ):
        address = api.create_repo(
            repo_id=repo, repo_type="dataset", private=private, exist_ok=True
        )
        info = api.dataset_info(repo)
        files = {file.rfilename for file in info.siblings or ()}
        if private and not info.private:
            raise _exists_already(repo, "it is public, and private=True")
        if files - {".gitattributes"} and RECORD not in files:
            fault = "it holds files that ropelens did not write"
            raise _exists_already(repo, fault)
        api.upload_folder(
            repo_id=repo,
            repo_type="dataset",
            folder_path=folder,
            delete_patterns=[*NUMBERS, "*.csv"],  # an earlier sweep must not remain
        )
    return str(address)


def _exists_already(repo: str, fault: str) -> BadArgument:
    return BadArgument(
        f"The dataset {repo} exists already: {fault}.",
        hint="another name, or private=False for a public dataset",
    )


def download(address: str) -> Path:
    """Fetch the numbers of hf://datasets/NAME/DATASET[@REVISION]; return their folder."""
    from huggingface_hub import snapshot_download  # slow

    hint = "hf://datasets/NAME/DATASET, uploaded by Analysis.push_to_hub"
    with explained(f"{address} could not be read.", hint, error=BadArgument):
        dataset = parse_dataset(address)
        fetched = snapshot_download(
            dataset.id,
            repo_type="dataset",
            revision=dataset.revision,
            allow_patterns=list(NUMBERS),
        )
        folder = Path(fetched)
        if not read_record(folder / dataset.folder):
            raise ValueError("it has no run.json of ropelens")
    return folder


def card(repo: str, record: Mapping[str, Any], findings: Sequence[str]) -> str:
    """The dataset card: model, text, versions and findings, without contents of the text."""
    from huggingface_hub import DatasetCardData

    head = DatasetCardData(tags=["ropelens", "rope", "interpretability"]).to_yaml()
    use = f'`ropelens.open("hf://datasets/{repo}")` reads this analysis.'
    items = [f"- {escape(sentence)}" for sentence in findings]
    rows = [
        f"| {escape(name)} | {escape(fact)} |"
        for name, fact in _card_facts(record).items()
        if fact
    ]
    lines = ["---", head, "---", f"# An analysis by ropelens\n\n{use}\n", *items, ""]
    return "\n".join([*lines, "| | |", "|---|---|", *rows, ""])


def _card_facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of the card: the model, the text and the versions."""
    model = record.get("model", {})
    text = record.get("text", {})
    return {
        "model name": model.get("name"),
        "model revision": model.get("revision"),
        "model fingerprint": model.get("fingerprint"),
        "text source": text.get("source"),
        "text fingerprint": text.get("fingerprint"),
        "context": record.get("context"),
        "tokens": record.get("tokens"),
        **record.get("versions", {}),
    }


def escape(text: object) -> str:
    """`text` on one line. Characters with a meaning in Markdown or HTML become entities."""
    line = " ".join(str(text).split())
    return re.sub(r"[^\w .,;()%+/-]", lambda match: f"&#{ord(match[0])};", line)
