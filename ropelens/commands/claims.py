"""The command `ropelens claims`, which tests published claims on one or several models."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import product
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ropelens.analysis.options import Options, OutOption, TextOption, with_options
from ropelens.checkpoints.load_options import setting
from ropelens.checkpoints.names import name_checkpoints
from ropelens.commands.measure import PlanOption, measure_and_save
from ropelens.commands.terminal import finish, print_lines, print_message
from ropelens.errors import BadArgument
from ropelens.runtime.folder import write_whole
from ropelens.runtime.progress import opening, show_progress

if TYPE_CHECKING:
    import pandas as pd

    from ropelens.analysis.plan import Plan

    Ledger = tuple[
        pd.DataFrame, dict[str, Any]
    ]  # a table, and `runs`: facts of each model

PLACES_HELP = "Models, or folders that analyze or claims wrote. [default: bundled]"
ROBUST_HELP = (
    "Test the claims on each --text at each of --contexts, also with another statistic. The "
    "first text at the longest context is the main setting."
)


@dataclass(frozen=True, kw_only=True)
class Testing(Options):
    """Options of `claims`."""

    model: str | None = setting(
        None,
        "MODEL",
        "Model of an analyzed folder DIR: also test claims that run it again.",
    )
    quick: bool = setting(
        False, None, "Skip the claims that run the model again.", name="--quick"
    )
    robust: bool = setting(False, None, ROBUST_HELP, name="--robust")
    contexts: Any = setting(
        None,
        "N,N,...",
        "Contexts for --robust. Claims that run the model again use the longest one.",
        parser=lambda text: tuple(map(int, text.split(","))),
    )


class Setting(NamedTuple):
    """An analysis in `folder`, `saved` or planned. If it `runs`, the model runs for claims."""

    name: str
    folder: Path
    plan: Plan | None = None
    saved: bool = False
    runs: bool = False


@with_options(
    Testing, only=Testing.__dataclass_fields__.keys() - {"prompts", "attention_on"}
)
def claims_command(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL|DIR", help=PLACES_HELP)
    ] = None,
    *,
    out: OutOption = Path("claims"),
    text: TextOption = None,
    plan: PlanOption = False,
    options: Testing,
) -> None:
    """Test published claims about RoPE on one or several models.

    Each claim compares a number of the model with its values under chance and geometry. The
    verdict is one of four: holds, contradicted, unresolved, not testable. Writes index.html
    (the page), claims.csv and claims.json (one row per claim and model) and run.json to DIR,
    and prints the table and the path of the page. DIR/NAME contains the analysis of each
    measured model. The same command can be repeated after a stop, and continues.

    \b
    Examples:
      ropelens claims
      ropelens claims analyzed/llama analyzed/qwen --out out
      ropelens claims analyzed/llama --model ./my-llama --text book.txt --out out
      ropelens claims ./my-llama --text a.txt --text b.txt --contexts 1024,2048 --robust
    """
    from ropelens.runtime.result_folder import check_out

    places = name_checkpoints(models or ["bundled"])
    if not plan:
        check_out(out, "claims", parts=places)
    ledgers = _read_ledgers(out, places, text, options)
    settings: dict[str, list[Setting]] = {}
    with opening(show_progress, "reading"):  # find errors before the first measurement
        for name in (name for name in places if name not in ledgers):
            settings[name] = _settings(
                out / name, places[name], text, options, run=not plan
            )
    for of_model in settings.values() if plan or options.robust else ():
        _print_work(of_model, timed=not plan)
    if plan:
        return
    for name, of_model in settings.items():
        ledgers[name] = _test_settings(of_model, name, out, options)
    _write(out, places, [ledgers[name] for name in places])
    finish(out)


def _read_ledgers(
    out: Path, places: dict[str, str], text: TextOption, options: Testing
) -> dict[str, Ledger]:
    """The ledgers among the places, by name. Refuses options that do not fit the places."""
    from ropelens.report.claims import read_ledger
    from ropelens.runtime.run_record import read_record

    kinds = {name: read_record(place).get("kind") for name, place in places.items()}
    models = {
        name: places[name] for name in places if kinds[name] in (None, "comparison")
    }
    what, hint, again = "", "", "Saved results are not measured again."
    if options.model is not None and (
        len(places) > 1 or models or not text or options.robust
    ):
        what = "--model is the model of one analyzed folder, and needs --text."
        hint = "ropelens claims DIR --model MODEL --text FILE"
    elif options.contexts and not options.robust:
        what, hint = "--contexts belongs to --robust.", "--context, or --robust"
    elif options.robust and len(models) < len(places):
        what, hint = again, "without --robust"
    elif text and not models and options.model is None:
        what, hint = again, "without --text"
    if what:
        raise BadArgument(what, hint=hint)
    claims = [name for name, kind in kinds.items() if kind == "claims"]
    ledgers = {name: read_ledger(places[name], out) for name in claims}
    names = [
        n for name in places for n in (ledgers[name][1] if name in ledgers else [name])
    ]
    if len({*names}) < len(names):
        what, seen = "A ledger has each model once.", ", ".join(names)
        raise BadArgument(what, seen=seen, hint="each name only once")
    return ledgers


def _settings(
    folder: Path, place: str, text: TextOption, options: Testing, *, run: bool
) -> list[Setting]:
    """The settings of a model or an analyzed folder, the main setting first."""
    from ropelens.analysis.plan import plan_analysis
    from ropelens.analysis.saved_numbers import check_model, saved_key
    from ropelens.runtime.keys import Key
    from ropelens.runtime.run_record import read_record

    record, runs = read_record(place), not options.quick
    if record and options.model is None:
        return [Setting("main", Path(place), saved=True)]
    if record:
        same: Any = {
            n: getattr(options, n) or record.get(n) for n in ("context", "sequences")
        }
        plan = plan_analysis(
            str(options.model), text, replace(options, **same), run=run
        )
        if not Key({"model": plan.model["fingerprint"]}).fits(saved_key(record)):
            what = f"{place} was measured on another model than {options.model}."
            raise BadArgument(what, hint="the same model, --dtype and --quantize")
        return [Setting("main", Path(place), plan, saved=True, runs=runs)]
    parts: dict[str, Any] = {"sample": text}
    if options.robust and text:
        named = name_checkpoints([*map(str, text)])
        parts = {name: [Path(path)] for name, path in named.items()}
    contexts = sorted({*(options.contexts or ())}, reverse=True) or [options.context]
    settings: dict[str, Setting] = {}
    for context, (name, part) in product(contexts, parts.items()):
        plan = plan_analysis(place, part, replace(options, context=context), run=run)
        label, inside = "main", folder
        if options.robust:
            label = f"{name}, {plan.text.context:,} tokens"
            inside = folder / f"{name}-{plan.text.context}-tokens"
        check_model(inside, plan.model, again=place)
        longest = runs and context == contexts[0]
        settings.setdefault(label, Setting(label, inside, plan, runs=longest))
    return [*settings.values()]


def _print_work(settings: list[Setting], *, timed: bool) -> None:
    """Print the plans of the settings, or if `timed` only the expected time."""
    from ropelens.claims.claim_runs import count_run_tokens

    tokens = 0.0
    for name, _, plan, saved, runs in settings:
        if plan is not None:
            more = count_run_tokens(plan.text, plan.source.config) if runs else 0
            tokens += more + plan.cost * (not saved)
            if not timed:
                print_lines(
                    f"{name}\n{plan}\nclaims  {more:,} tokens in further runs\n"
                )
    if timed and (plan := settings[0].plan):
        expected = timedelta(seconds=round(tokens * plan.seconds_per_token()))
        print_message(f"expected time: {expected} for {len(settings)} settings", by="")


def _test_settings(
    settings: list[Setting], name: str, out: Path, options: Testing
) -> Ledger:
    """The ledger of a model; its analyses are measured if they are not saved."""
    import pandas as pd

    from ropelens.claims.ledger import compare_settings
    from ropelens.profiles.measures import open_profile
    from ropelens.report.tables import short_facts
    from ropelens.runtime.folder import PAGE
    from ropelens.runtime.savepoint import UNFINISHED

    tables = []
    for number, part in enumerate(settings, 1):
        if options.robust:
            print_message(f"setting {number} of {len(settings)}: {part.name}", by="")
        if part.plan is not None and not part.saved:
            measure_and_save(part.plan, part.folder, once=True)
        tables.append(_table_of(part, out / UNFINISHED / name, options))
    folder = settings[0].folder
    profile = open_profile(folder / "profile.nc")
    facts = {
        "facts": ", ".join(short_facts(profile)),
        "page": relpath(folder / PAGE, out),
    }
    facts |= {key: profile.attrs[key] for key in ("model", "tokens_sha256")}
    table = pd.concat(tables)
    table = compare_settings(table) if options.robust else table.drop(columns="setting")
    return table.assign(model=name), {name: facts}


def _table_of(part: Setting, scratch: Path, options: Testing) -> pd.DataFrame:
    """The table of a setting, followed by the table of the other statistics if `robust`.

    It is saved in `scratch`, with every setting that affects the numbers in its name.
    """
    import pandas as pd

    from ropelens.claims.claim_runs import claim_runs, ledger  # fewer draws in tests
    from ropelens.claims.claims import OTHERS
    from ropelens.profiles.heads import require_budget
    from ropelens.profiles.measurement import versions
    from ropelens.profiles.measures import open_profile
    from ropelens.runtime.keys import Key
    from ropelens.runtime.savepoint import savepoint

    profile = open_profile(part.folder / "profile.nc")
    require_budget(profile)
    seed, plan, runs = options.seed, part.plan, None
    settings = {
        "tokens_sha256": profile.attrs.get("tokens_sha256"),
        "created": profile.attrs.get("created"),
        "runs": part.runs,
        "seed": seed,
        "robust": options.robust,
        "versions": versions(),
    }
    if plan is not None:
        settings = settings | plan.model | plan.arguments
    digest = Key(settings).digest[:16]
    if (file := scratch / f"{digest}.csv").exists():
        return pd.read_csv(file).fillna(
            dict.fromkeys(("over", "other", "floor_day"), "")
        )
    if plan is not None and part.runs:
        with opening(show_progress, "loading"):
            live = plan.read()
        how: Any = {"tokenizer": plan.source.tokenizer, "progress": show_progress}
        with savepoint(scratch / digest, settings):
            runs = claim_runs(profile, live, plan.text, seed=seed, **how)
    table = ledger(profile, seed=seed, runs=runs).assign(setting=part.name)
    if options.robust:
        others = ledger(profile, seed=seed, runs=runs, claims=OTHERS)
        others["setting"] = f"{part.name}, other statistic"
        table = pd.concat([table, others])
    write_whole(file, table.to_csv(index=False))
    return table


def _write(out: Path, places: dict[str, str], ledgers: list[Ledger]) -> None:
    """Print the table of all models, and write it with its page."""
    import pandas as pd

    from ropelens.figures.formats import signed
    from ropelens.profiles.measurement import versions
    from ropelens.report.claims import render_claims
    from ropelens.report.sentences.claims import TABLE_COLUMNS, claims_sentences
    from ropelens.runtime.result_folder import ResultFolder
    from ropelens.runtime.run_record import this_command
    from ropelens.runtime.savepoint import UNFINISHED

    table = pd.concat([table for table, _ in ledgers])
    runs = {name: facts for _, entries in ledgers for name, facts in entries.items()}
    columns = [
        "claim",
        "layers",
        "verdict",
        "number",
        "null_low",
        "null_high",
        "q_value",
    ]
    shown = table[columns + ["robust"] * ("robust" in table)]
    for model, rows in shown.groupby(table["model"], sort=False):
        number = partial(signed, form=".3g")
        lines = rows.to_string(index=False, na_rep="–", float_format=number)
        print_lines(f"{model}\n{lines}\n", err=True)
    numbers = dict(zip(table["claim"], table["what"], strict=True))
    meanings = [f"  {claim}: {what}" for claim, what in numbers.items()]
    print_lines("\n".join([TABLE_COLUMNS, *meanings, ""]), err=True)
    names = [facts.get("model", name) for name, facts in runs.items()]
    model = {"name": names[0] if len(names) == 1 else f"{len(names)} models"}
    findings = claims_sentences(table, places)
    record = {
        "command": this_command(),
        "versions": versions(),
        "findings": findings,
        "model": model,
        "runs": runs,
    }
    results = ResultFolder(
        kind="claims",
        findings=findings,
        files={"claims.csv": table, "claims.json": table},
        record=record,
        page=partial(render_claims, table, record),
    )
    results.write(out)
    shutil.rmtree(out / UNFINISHED, ignore_errors=True)
