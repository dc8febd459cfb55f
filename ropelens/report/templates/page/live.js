// Live planes: what the chosen head would attend to with some of its planes stopped.

/** Weights of a head as it is shown: without the planes that are stopped. */
let last = {};
function shownWeights(layer, head) {
  const band = state.band && page.live[layer][head] ? state.band : null;
  const asked = JSON.stringify([state.excerpt, layer, head, band]);
  if (last[asked] === undefined) {
    if (Object.keys(last).length > 3) last = {};
    last[asked] = band ? attend(state.excerpt, layer, head, band) : asItIs(state.excerpt, layer, head);
  }
  return last[asked];
}

function stopBand(band) {
  state.band = band && band.from <= band.to ? band : null;
  showBand();
  remember(false);
  return refresh();
}

/** Planes of the chosen head's layer that turn, from the fastest; p counts among them. */
const turns = () => turning(state.layer, null).filter((frequency) => frequency > 0).length;
const span = (frequency) => frequency > 0 ? (2 * Math.PI / frequency).toLocaleString("en", { maximumSignificantDigits: 3 }) : "∞";

const NOT_LIVE = "The planes of this head cannot be stopped here: its queries and keys are not kept, or more than they decides its attention.";
function showBand() {
  const { layer, head, band } = state;
  const live = page.live[layer][head], count = page.planes[layer], rotating = turns();
  const names = page.frequencies[layer].slice(0, count).map(span);
  for (const [id, at] of [["live-from", band?.from ?? ""], ["live-to", band?.to ?? ""]]) {
    const choices = [["", "–"], ...names.map((name, plane) => [plane, name])];
    if ($(id).dataset.planes !== String(names)) {
      $(id).dataset.planes = names;
      $(id).replaceChildren(...choices.map(([value, textContent]) =>
        Object.assign(document.createElement("option"), { value, textContent })));
    }
    $(id).value = at;
  }
  $("live-p").max = rotating;
  $("live-p").value = band && isTail(band, rotating) ? band.from : rotating;
  $("live-mode").value = band?.mode ?? state.mode;
  for (const control of $("live").querySelectorAll("input, select, button")) {
    control.disabled = !(live && count && (rotating || control.id !== "live-p")) && control.id !== "pick-excerpt";
  }
  $("live-words").textContent = live ? bandWords(band, rotating, count) : NOT_LIVE;
}

/** Whether a band is the slowest planes that turn, as p-RoPE stops them. */
const isTail = (band, rotating) => band.from < rotating && band.to >= rotating - 1;

function bandWords(band, rotating, count) {
  if (!count) return "This layer does not rotate, and has no planes that could stop.";
  if (!rotating && band?.mode !== "drop") return "No plane of this layer rotates, so none can stop; choose planes that drop out.";
  if (!band) return "All planes turn. Lower p, or choose planes, to see what the head does without them.";
  const frequencies = page.frequencies[state.layer];
  const many = band.to - band.from + 1;
  const p = isTail(band, rotating) && band.mode === "stop" ? `p = ${(band.from / rotating).toFixed(2)}: ` : "";
  const ends = [span(frequencies[band.from]), span(frequencies[band.to])];
  const planes = many === 1 ? `the plane of ${ends[0]} tokens` : `${many} planes (${ends.join(" to ")} tokens)`;
  const measuredLoss = p && page.stopped.find(({ kept }) => Math.abs(kept - band.from / rotating) < 1e-6);
  return `${p}${planes} ${band.mode === "stop" ? "stand still" : "drop out"} in this head.`
    + (measuredLoss ? ` Stopped in all heads: loss ${measuredLoss.words}.` : "");
}

/** The stopped planes as a band behind the head's planes. */
function markBand(element, layer, head) {
  const before = element.layout.shapes ?? [];
  const shapes = before.filter(({ name }) => name !== "band");
  if (!state.band && shapes.length === before.length) return null;
  if (state.band && page.live[layer][head]) {
    const at = [...part(page.arrays.wavelength_position, layer, 0)].slice(0, page.planes[layer]);
    const step = at.length > 1 ? Math.sqrt(at[1] / at[0]) : 1.3;
    shapes.push({ name: "band", type: "rect", xref: "x", yref: "paper", y0: 0, y1: 1, layer: "below",
      x0: at[Math.min(state.band.from, at.length - 1)] / step, x1: at[Math.min(state.band.to, at.length - 1)] * step,
      line: { width: 0 }, fillcolor: "rgba(217,112,15,0.22)" });
  }
  return Plotly.relayout(element, { shapes });
}

/** Below the kernel of the whole text, that of this excerpt: as it is and as it is shown. */
function showDistances(element, layer, head) {
  const extra = element.data.findIndex(({ meta }) => meta?.role === "excerpt");
  if (extra >= 0) Plotly.deleteTraces(element, element.data.map((_, i) => i).slice(extra));
  if (!state.band || !page.live[layer][head]) return null;
  const lines = [["this excerpt, as it is", asItIs(state.excerpt, layer, head), "dot"],
    ["this excerpt, planes stopped", shownWeights(layer, head), "solid"]];
  return Plotly.addTraces(element, lines.map(([name, weights, dash]) => {
    const y = byDistance(weights);
    return { name, y, x: y.map((_, distance) => distance + 1), mode: "lines", meta: { role: "excerpt" },
      line: { color: "#d9700f", width: 2, dash }, hovertemplate: `%{y:.2%} ${name}<extra></extra>` };
  }));
}

/** Every token's name where there is room, every second or third where there is not. */
function tokenAxes(wide) {
  const { ticks } = page.excerpts[state.excerpt];
  const every = Math.ceil(ticks.length / (wide ? 50 : 24));
  const kept = (_, i) => i % every === 0;
  const at = ticks.map((_, i) => i).filter(kept), named = ticks.filter(kept);
  const size = wide ? 10 : 9, last = ticks.length - 0.5;
  return { "xaxis.tickvals": at, "xaxis.ticktext": named, "xaxis.tickfont.size": size, "xaxis.range": [-0.5, last],
    "yaxis.tickvals": at, "yaxis.ticktext": named, "yaxis.tickfont.size": size, "yaxis.range": [last, -0.5] };
}

function showAttention(element, layer, head) {
  const { names } = page.excerpts[state.excerpt];
  const at = names.map((_, i) => i);
  const named = names.map((query) => names.map((key) => [query, key]));
  const changed = { x: [at], y: [at], z: [shownWeights(layer, head)], customdata: [named] };
  return Plotly.update(element, changed, tokenAxes(element.clientWidth > 520));
}

for (const [id, end] of [["live-from", "from"], ["live-to", "to"]]) {
  $(id).addEventListener("change", ({ target: { value } }) => {
    if (value === "") return stopBand(null);
    const plane = Number(value), band = { mode: state.mode, from: plane, to: plane, ...state.band, [end]: plane };
    return stopBand({ ...band, from: Math.min(band.from, end === "to" ? plane : Infinity), to: Math.max(band.to, end === "from" ? plane : 0) });
  });
}
$("live-p").addEventListener("input", ({ target: { value } }) => {
  const rotating = turns(), from = Number(value);
  stopBand(from < rotating ? { from, to: rotating - 1, mode: state.mode } : null);
});
$("live-mode").addEventListener("change", ({ target: { value } }) => {
  state.mode = value;
  stopBand(state.band && { ...state.band, mode: value });
});
$("live-reset").addEventListener("click", () => stopBand(null));
$("pick-excerpt").replaceChildren(...page.excerpts.map(({ tokens }, i) => Object.assign(document.createElement("option"),
  { value: i, textContent: `${i + 1}: ${tokens.slice(0, 6).join("").replaceAll("␣", " ")}…` })));
$("pick-excerpt").addEventListener("change", ({ target: { value } }) => chooseExcerpt(Number(value)));
