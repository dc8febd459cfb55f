"""The settings in which `ropelens claims` tests a model, and their ledgers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropelens.analysis.options import Options, TextOption
from ropelens.checkpoints.load_options import setting
from ropelens.checkpoints.names import name_checkpoints
from ropelens.commands.measure import measure_and_save
from ropelens.commands.terminal import print_lines, print_message
from ropelens.errors import BadArgument
from ropelens.runtime.folder import write_whole
from ropelens.runtime.progress import opening, show_progress

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    from ropelens.analysis.plan import Plan

ROBUST_HELP = (
    "Test the claims on each --text at each of --contexts, and also with the second statistic "
    "of each claim. The first text at the longest context is the main setting."
)
TEXT_COLUMNS = ("over", "other", "floor_day")  # of a ledger; they may be empty


@dataclass(frozen=True, kw_only=True)
class Testing(Options):
    """Options of `claims`."""

    model: str | None = setting(
        None,
        "MODEL",
        "Model of an analyzed folder DIR, with its --text: also test the claims that run it "
        "again.",
    )
    quick: bool = setting(
        False, None, "Skip the claims that run the model again.", name="--quick"
    )
    robust: bool = setting(False, None, ROBUST_HELP, name="--robust")
    contexts: Any = setting(
        None,
        "N,N,...",
        "Contexts for --robust, instead of --context. Claims that run the model again use the "
        "longest one.",
        parser=lambda text: tuple(map(int, text.split(","))),
    )


@dataclass(frozen=True)
class Setting:
    """An analysis in `folder`, `saved` or planned. If it `runs`, the model runs for claims."""

    name: str
    folder: Path
    plan: Plan | None = None
    saved: bool = False
    runs: bool = False


@dataclass(frozen=True)
class Ledger:
    """A table of claims, and the facts about each model in it."""

    table: pd.DataFrame
    models: dict[str, Any]


def settings_of(
    folder: Path, place: str, text: TextOption, options: Testing, *, run: bool
) -> list[Setting]:
    """The settings of a model or an analyzed folder, the main setting first."""
    from ropelens.runtime.run_record import read_record

    record = read_record(place)
    if not record:
        return _settings_of_model(folder, place, text, options, run=run)
    if options.model is None:
        return [Setting("main", Path(place), saved=True)]
    return [_setting_of_analysis(place, record, text, options, run=run)]


def _setting_of_analysis(
    place: str, record: dict[str, Any], text: TextOption, options: Testing, *, run: bool
) -> Setting:
    """The setting of an analyzed folder, whose model runs for some claims."""
    from ropelens.analysis.plan import plan_analysis
    from ropelens.analysis.saved_numbers import saved_key
    from ropelens.profiles.measures import open_profile
    from ropelens.runtime.keys import Key

    same_size = replace(
        options,
        context=options.context or record.get("context"),
        sequences=options.sequences or record.get("sequences"),
    )
    plan = plan_analysis(str(options.model), text, same_size, run=run)
    if not Key({"model": plan.model["fingerprint"]}).fits(saved_key(record)):
        raise BadArgument(
            f"{place} was measured on another model than {options.model}.",
            hint="the same model, --dtype and --quantize",
        )
    measured = open_profile(Path(place) / "profile.nc").attrs["tokens_sha256"]
    if plan.text.fingerprint != measured:
        raise BadArgument(
            f"{place} was measured on other tokens, and a claim needs the same tokens.",
            seen=f"the text of the analysis: {record.get('arguments', {}).get('text')}",
            hint="the same --text, --seed, --bos, --context and --sequences as the analysis",
        )
    return Setting("main", Path(place), plan, saved=True, runs=not options.quick)


def _settings_of_model(
    folder: Path, place: str, text: TextOption, options: Testing, *, run: bool
) -> list[Setting]:
    """A setting for each context and text if the options are robust; otherwise one."""
    from ropelens.analysis.plan import plan_analysis
    from ropelens.analysis.saved_numbers import check_model

    texts: dict[str, TextOption] = {"sample": text}
    if options.robust and text:
        by_name = name_checkpoints([*map(str, text)])
        texts = {name: [Path(path)] for name, path in by_name.items()}
    contexts = sorted({*(options.contexts or ())}, reverse=True) or [options.context]
    settings: dict[str, Setting] = {}
    for context in contexts:
        for name, files in texts.items():
            at_context = replace(options, context=context)
            plan = plan_analysis(place, files, at_context, run=run)
            label = "main"
            inside = folder
            if options.robust:
                label = f"{name}, {plan.text.context:,} tokens"
                inside = folder / f"{name}-{plan.text.context}-tokens"
            check_model(inside, plan.model, again=place)
            runs = not options.quick and context == contexts[0]
            settings.setdefault(label, Setting(label, inside, plan, runs=runs))
    return [*settings.values()]


def print_plans(settings: list[Setting]) -> None:
    """Print the plan of each setting."""
    for part in settings:
        if part.plan is not None:
            tokens = _tokens_of_runs(part)
            words = f"claims  {tokens:,} tokens in further runs"
            print_lines(f"{part.name}\n{part.plan}\n{words}\n")


def print_expected_time(settings: list[Setting]) -> None:
    """Print how long the measurements of the settings will take on this machine."""
    first = settings[0].plan
    if first is None:
        return
    tokens = 0.0
    for part in settings:
        tokens += _tokens_of_runs(part)
        if part.plan is not None and not part.saved:
            tokens += part.plan.cost
    expected = timedelta(seconds=round(tokens * first.seconds_per_token()))
    print_message(f"expected time: {expected} for {len(settings)} settings", by="")


def _tokens_of_runs(part: Setting) -> int:
    """Tokens that the model reads for claims, in addition to the analysis."""
    from ropelens.claims.claim_runs import count_run_tokens

    if part.plan is None or not part.runs:
        return 0
    return count_run_tokens(part.plan.text, part.plan.source.config)


def ledger_of_settings(
    settings: list[Setting], name: str, out: Path, options: Testing
) -> Ledger:
    """The ledger of a model. Analyses that are not saved are measured."""
    import pandas as pd

    from ropelens.claims.ledger import compare_settings
    from ropelens.profiles.measures import open_profile
    from ropelens.report.run_facts import short_facts
    from ropelens.runtime.folder import PAGE, UNFINISHED

    scratch = out / UNFINISHED / name
    tables = []
    for number, part in enumerate(settings, start=1):
        if options.robust:
            print_message(f"setting {number} of {len(settings)}: {part.name}", by="")
        if part.plan is not None and not part.saved:
            measure_and_save(part.plan, part.folder, once=True)
        is_first = number == 1
        tables.append(_table_of(part, scratch, options, is_first=is_first))
    table = pd.concat(tables)
    if options.robust:
        table = compare_settings(table)
    else:
        table = table.drop(columns="setting")
    folder = settings[0].folder
    profile = open_profile(folder / "profile.nc")
    model = {
        "facts": ", ".join(short_facts(profile)),
        "page": relpath(folder / PAGE, out),
        "model": profile.attrs["model"],
        "tokens_sha256": profile.attrs["tokens_sha256"],
    }
    return Ledger(table.assign(model=name), {name: model})


def _table_of(
    part: Setting, scratch: Path, options: Testing, *, is_first: bool
) -> pd.DataFrame:
    """The table of a setting, followed by the table of the other statistics if `robust`.

    It is saved in `scratch`, with every setting that affects the numbers in its name. A
    stopped run saved the first setting first, so without it all progress is of other runs.
    """
    import pandas as pd

    from ropelens.claims.claim_runs import ledger  # fewer draws in tests
    from ropelens.claims.claims import OTHERS
    from ropelens.profiles.heads import require_budget
    from ropelens.profiles.measures import open_profile
    from ropelens.runtime.keys import Key

    profile = open_profile(part.folder / "profile.nc")
    require_budget(profile)
    identity = _identity(profile, part, options)
    digest = Key(identity).digest[:16]
    file = scratch / f"{digest}.csv"
    if is_first:
        _report_unused_progress(scratch, digest)
    if file.exists():
        return pd.read_csv(file).fillna(dict.fromkeys(TEXT_COLUMNS, ""))
    runs = None
    if part.plan is not None and part.runs:
        runs = _run_again(part.plan, profile, scratch / digest, identity, options.seed)
    table = ledger(profile, seed=options.seed, runs=runs)
    table = table.assign(setting=part.name)
    if options.robust:
        others = ledger(profile, seed=options.seed, runs=runs, claims=OTHERS)
        others["setting"] = f"{part.name}, other statistic"
        table = pd.concat([table, others])
    write_whole(file, table.to_csv(index=False))
    return table


def _report_unused_progress(scratch: Path, digest: str) -> None:
    """Print that the progress in `scratch` is not used, unless some of it has the digest."""
    saved = {path.stem for path in scratch.glob("*")}
    if saved and digest not in saved:
        print_message(
            f"the progress in {scratch} is not used: it is from other settings or from "
            "another version of ropelens",
            by="",
        )


def _identity(profile: xr.Dataset, part: Setting, options: Testing) -> dict[str, Any]:
    """Everything that affects the numbers of a setting."""
    from ropelens.profiles.measurement import versions

    identity: dict[str, Any] = {
        "tokens_sha256": profile.attrs.get("tokens_sha256"),
        "created": profile.attrs.get("created"),
        "runs": part.runs,
        "seed": options.seed,
        "robust": options.robust,
        "versions": versions(bridged=options.uses_bridge),
    }
    if part.plan is None:
        return identity
    return identity | part.plan.model | part.plan.arguments


def _run_again(
    plan: Plan, profile: xr.Dataset, folder: Path, identity: dict[str, Any], seed: int
) -> Any:
    """The further runs that claims need. The progress is saved in `folder`."""
    from ropelens.claims.claim_runs import run_for_claims
    from ropelens.runtime.savepoint import savepoint

    with opening(show_progress, "loading"):
        live = plan.read()
    with savepoint(folder, identity):
        return run_for_claims(
            profile,
            live,
            plan.text,
            seed=seed,
            tokenizer=plan.source.tokenizer,
            progress=show_progress,
        )
