"""The command `ropelens claims`, which tests published claims on one or several models."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import product
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropelens.analysis.options import Options, OutOption, TextOption, with_options
from ropelens.checkpoints.load_options import option
from ropelens.checkpoints.names import name_checkpoints, short_names
from ropelens.commands.analyze import PlanOption, measure_and_save
from ropelens.commands.terminal import finish, print_lines, print_message
from ropelens.errors import BadArgument
from ropelens.runtime.folder import file_name
from ropelens.runtime.progress import opening, show_progress

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    from ropelens.analysis.plan import Plan


NOT_IN_CLAIMS = {"prompts", "attention_on"}


@with_options(Options, only=Options.__dataclass_fields__.keys() - NOT_IN_CLAIMS)
def claims_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL|DIR",
            help="Models as for ropelens analyze, or folders that ropelens analyze or claims "
            "wrote, which are not measured again. [default: bundled]",
        ),
    ] = None,
    *,
    out: OutOption = Path("claims"),
    text: TextOption = None,
    model: Annotated[
        str | None,
        option(
            "MODEL", "The model of an analyzed folder DIR, for the claims that need more runs."
        ),
    ] = None,
    quick: Annotated[
        bool, option(None, "Skip the claims that need more runs of the model.", name="--quick")
    ] = False,
    robust: Annotated[
        bool,
        option(
            None,
            "Also test the claims on each --text at each of --contexts, and with another "
            "statistic. The first text at the longest context is the main setting.",
            name="--robust",
        ),
    ] = False,
    contexts: Annotated[
        Any,
        option(
            "N,N,...",
            "Contexts of --robust. Claims that need more runs use only the longest one.",
            parser=lambda text: tuple(map(int, text.split(","))),
        ),
    ] = None,
    plan: PlanOption = False,
    options: Options,
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
    from ropelens.runtime.results import PAGE, check_out
    from ropelens.runtime.savepoint import UNFINISHED

    places = name_checkpoints(models or ["bundled"])
    if not plan:
        check_out(out, "claims", parts=places)
    if contexts and not robust:
        raise BadArgument("--contexts belongs to --robust.", hint="--context, or --robust")
    with opening(show_progress, "starting"):  # importing torch takes seconds
        from ropelens.report.tables import short_facts
    ledgers = _read_ledgers(places, text, model, robust=robust)
    settings: dict[str, list[Setting]] = {}
    with opening(show_progress, "reading"):  # find errors before the first measurement
        for name in (name for name, (table, _) in ledgers.items() if table is None):
            given = (out / name, places[name], model, text, options)
            lengths = contexts or (options.context,)
            settings[name] = _plan_settings(*given, lengths if robust else (), run=not plan)
    if plan or robust:
        for of_model in settings.values():
            _print_plans(of_model, quick=quick, timed=not plan)
    if plan:
        return
    tables: list[pd.DataFrame] = []
    runs: dict[str, Any] = {}
    for name, (table, entries) in ledgers.items():
        place = Path(places[name])
        if table is None:
            how: dict[str, Any] = {"quick": quick, "seed": options.seed}
            table, profile = _test_settings(settings[name], out / UNFINISHED / name, **how)
            table, place = table.assign(model=name), settings[name][0].folder
            facts = {"facts": ", ".join(short_facts(profile)), "page": PAGE}
            entries[name] = facts | {"tokens_sha256": profile.attrs["tokens_sha256"]}
        for entry in entries.values():
            if "page" in entry:  # the page of the analysis
                entry["page"] = relpath(place / entry["page"], out)
        runs |= entries
        tables.append(table)
    _write_ledger(out, tables, runs, places)
    shutil.rmtree(out / UNFINISHED, ignore_errors=True)
    finish(out)


@dataclass(frozen=True)
class Setting:
    """A text and a context, or a saved analysis in `folder`.

    With a `plan`, the model can run. If the analysis is `saved`, it is not measured again.
    """

    name: str
    folder: Path
    plan: Plan | None
    saved: bool = False
    runs: bool = True  # claims that need more runs are tested
    others: bool = False  # claims are also tested with their other statistic


def _plan_settings(
    folder: Path,
    place: str,
    model: str | None,
    text: TextOption,
    options: Options,
    contexts: tuple[int | None, ...],
    *,
    run: bool,
) -> list[Setting]:
    """The settings of a model or an analyzed folder, the main setting first."""
    from ropelens.analysis.analysis import check_model
    from ropelens.analysis.plan import plan_analysis
    from ropelens.runtime.results import read_record

    if (record := read_record(place)) and model is None:
        return [Setting("", Path(place), None, saved=True)]
    if record and model is not None:
        names = ("context", "sequences")
        measured: dict[str, Any] = {n: getattr(options, n) or record.get(n) for n in names}
        plan = plan_analysis(model, text, replace(options, **measured), run=run)
        if plan.model["fingerprint"] != record.get("model", {}).get("fingerprint"):
            what = f"{place} was measured on another model than {model}."
            raise BadArgument(what, hint="the same model, --dtype and --quantize")
        return [Setting("", Path(place), plan, saved=True)]
    if not contexts:
        plan = plan_analysis(place, text, options, run=run)
        check_model(folder, plan.model, again=place)
        return [Setting("", folder, plan)]
    texts, lengths = text or (), sorted({*contexts}, key=lambda n: n or 0, reverse=True)
    if len({*texts}) < len(texts):
        raise BadArgument("Each --text is a setting of its own.", hint="each text only once")
    parts: list[tuple[str, Path | None]] = [*zip(short_names(texts), texts, strict=True)]
    settings = []
    for context, (name, path) in product(lengths, parts or [("sample", None)]):
        part = None if path is None else [path]
        plan = plan_analysis(place, part, replace(options, context=context), run=run)
        label = f"{name}, {plan.text.context:,} tokens"
        inside = folder / file_name(f"{name}-{plan.text.context}")
        check_model(inside, plan.model, again=place)
        how = {"runs": context == lengths[0], "others": True}
        settings.append(Setting(label, inside, plan, **how))
    return settings


def _print_plans(settings: list[Setting], *, quick: bool, timed: bool) -> None:
    """Print the work of the settings, and if `timed` the expected time at the measured pace."""
    from ropelens.analysis.plan import seconds_per_token
    from ropelens.claims.claim_runs import count_run_tokens
    from ropelens.config_facts import stated_context

    plans = [(setting, setting.plan) for setting in settings if setting.plan]
    tokens = 0.0
    for setting, plan in plans:
        more = (
            0
            if quick or not setting.runs
            else count_run_tokens(plan.text, stated_context(plan.source.config))
        )
        tokens += more + plan.cost * (not setting.saved)
        if not timed:
            lines = [setting.name, plan, f"claims  {more:,} tokens in further runs"]
            print_lines("\n".join(map(str, filter(None, lines))))
    if timed and plans:
        seconds = tokens * seconds_per_token(plans[0][1])
        length = str(timedelta(seconds=round(seconds)))
        print_message(f"expected time: {length} for {len(plans)} settings", by="")


def _test_settings(
    settings: list[Setting], scratch: Path, *, quick: bool, seed: int
) -> tuple[pd.DataFrame, xr.Dataset]:
    """Table and profile of the main setting; measures what is not in a folder yet.

    Each setting is saved in `scratch` as it ends.
    """
    from ropelens.claims.tables import compare_settings
    from ropelens.profiles.measures import open_profile

    tables: dict[str, pd.DataFrame] = {}
    profiles: list[xr.Dataset] = []
    for number, setting in enumerate(settings):
        if len(settings) > 1:
            print_message(f"setting {number + 1} of {len(settings)}: {setting.name}", by="")
        if setting.plan is not None and not setting.saved:
            setting.folder.parent.mkdir(parents=True, exist_ok=True)
            measure_and_save(setting.plan, setting.folder, once=True)
        profile = open_profile(setting.folder / "profile.nc")
        profiles.append(profile)
        runs = setting.runs and not quick
        tables |= _tables_of(setting, profile, scratch / str(number), runs=runs, seed=seed)
    first = next(iter(tables.values()))
    return compare_settings(tables) if len(tables) > 1 else first, profiles[0]


def _tables_of(
    setting: Setting, profile: xr.Dataset, scratch: Path, *, runs: bool, seed: int
) -> dict[str, pd.DataFrame]:
    """The table of a setting, and the table of the other statistics, by names of settings."""
    from ropelens.claims.claim_runs import claim_runs, ledger  # fewer draws in tests
    from ropelens.profiles.heads import require_budget
    from ropelens.profiles.measurement import versions
    from ropelens.runtime.results import read_tables, write_tables
    from ropelens.runtime.savepoint import savepoint

    require_budget(profile)
    plan, more = setting.plan, dict[str, Any]()
    key = {"tokens": profile.attrs["tokens_sha256"], "runs": runs, "versions": versions()}
    key |= {"seed": seed, "created": profile.attrs["created"]}
    if saved := read_tables(scratch.with_suffix(".json"), key):
        return saved
    if plan is not None and runs:
        with opening(show_progress, "loading"):
            live = plan.read()
        how: dict[str, Any] = {
            "tokenizer": plan.source.tokenizer,
            "seed": seed,
            "progress": show_progress,
        }
        with savepoint(scratch, key | plan.model):
            more = claim_runs(profile, live, plan.text, **how)
    tables = {setting.name: ledger(profile, seed=seed, **more)}
    if setting.others:
        other = f"{setting.name}, other statistic"
        tables[other] = ledger(profile, seed=seed, other=True, **more)
    write_tables(scratch.with_suffix(".json"), key, tables)
    return tables


def _read_ledgers(
    places: dict[str, str], text: TextOption, model: str | None, *, robust: bool
) -> dict[str, tuple[pd.DataFrame | None, dict[str, Any]]]:
    """Table and `runs` of each ledger, by name. Other places have None and an empty run."""
    from ropelens.report.claims import read_ledger
    from ropelens.runtime.results import other_place, read_record

    kinds = {name: read_record(place).get("kind") for name, place in places.items()}
    saved = not {None, "comparison"} & {*kinds.values()}
    if model is not None and (len(places) > 1 or not saved or not text or robust):
        what = "--model is the model of one analyzed folder, and needs --text."
        raise BadArgument(what, hint="ropelens claims DIR --model MODEL --text FILE")
    if saved and model is None and (text or robust):
        hint = f"without {'--robust' if robust else '--text'}"
        raise BadArgument("Saved results are not measured again.", hint=hint)
    ledgers: dict[str, tuple[pd.DataFrame | None, dict[str, Any]]] = {}
    for name, place in places.items():
        if robust and kinds[name] not in (None, "comparison"):
            raise BadArgument(f"{place} is not measured again.", hint="without --robust")
        if kinds[name] in (None, "comparison") and not (text or place.startswith("bundled")):
            raise other_place(place, "an analyzed folder, or a model with --text FILE")
        ledgers[name] = read_ledger(place) if kinds[name] == "claims" else (None, {name: {}})
    names = [name for _, entries in ledgers.values() for name in entries]
    if len(set(names)) < len(names):
        what, seen = "A ledger has each model once.", ", ".join(names)
        raise BadArgument(what, seen=seen, hint="each name only once")
    return ledgers


def _write_ledger(
    folder: Path, tables: list[pd.DataFrame], runs: dict[str, Any], places: dict[str, str]
) -> None:
    import pandas as pd

    from ropelens.analysis.plan import this_command
    from ropelens.figures.formats import signed
    from ropelens.profiles.measurement import versions
    from ropelens.report.claims import claims_sentences, render_claims
    from ropelens.report.render import write_sentence
    from ropelens.runtime.results import write_folder

    table = pd.concat(tables)
    columns = ["claim", "layers", "verdict", "number", "null_low", "null_high", "q_value"]
    shown = table[columns + ["robust"] * ("robust" in table)]
    for name, rows in shown.groupby(table["model"], sort=False):
        number = partial(signed, form=".3g")
        lines = rows.to_string(index=False, na_rep="–", float_format=number)
        print_lines(f"{name}\n{lines}\n", err=True)
    numbers = dict(zip(table["claim"], table["what"], strict=True))
    meanings = [f"  {claim}: {what}" for claim, what in numbers.items()]
    print_lines("\n".join([write_sentence("claims", "table"), *meanings, ""]), err=True)
    record = {
        "kind": "claims",
        "findings": claims_sentences(table, places),
        "command": this_command(),
        "model": {"name": ", ".join(runs) if len(runs) == 1 else f"{len(runs)} models"},
        "runs": runs,
        "versions": versions(),
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    page = partial(render_claims, table, record)
    results = {"claims.csv": table, "claims.json": table}
    write_folder(folder, record=record, results=results, page=page)
