// Draws each figure when its tab is first shown, and then fills in the data of the chosen head.
const plot = (name) => $(`plot-${name}`);
const dark = matchMedia("(prefers-color-scheme: dark)");
const theme = () => page.templates[dark.matches ? "dark" : "light"];
const seen = (element) => element.offsetParent !== null && !far.has(element);
const drawn = (element) => Boolean(element.data);

function options(name) {
  const zoom = ["kernel", "claim", "follow", "pair"].includes(name);
  return { ...plotOptions(`ropelens-${name}`, $(`${name}-title`)?.textContent, zoom ? [["zoom2d", "pan2d", "resetScale2d"]] : []),
    displayModeBar: matchMedia("(hover: hover)").matches ? "hover" : false };
}

/** Sets the height of a figure. Its width follows the window. */
function size(name, element) {
  element.style.height = `${page.figures[name].layout.height}px`;
}

/** Figures that are far from the visible part of the page. They are drawn when it comes near, or for print. */
const far = new Set();
const nearing = new IntersectionObserver((entries) =>
  comeNear(entries.filter(({ isIntersecting }) => isIntersecting).map(({ target }) => target)), { rootMargin: "50% 0px" });
function comeNear(elements) {
  for (const element of elements) {
    far.delete(element);
    nearing.unobserve(element);
  }
  if (elements.length) refresh();
}

const drawnOf = new WeakMap();
async function draw(name, element = plot(name), model = page) {
  // Copy, because plotly changes its arguments.
  const { data, layout } = structuredClone(model.figures[name]);
  delete layout.height;
  size(name, element);
  await Plotly.newPlot(element, data, { ...layout, template: theme() }, options(name));
  if (model === page) CLICKS[name]?.(element);
  drawnOf.set(element, model);
}

/** Fills the traces with the arrays of a head that their `meta` names. */
function refill(element, layer, head, model = page) {
  const traces = [...element.data.keys()].filter((i) => element.data[i].meta && !element.data[i].meta.role);
  const values = (axis) => traces.map((i) => element.data[i].meta[axis]).map((name) => name && part(model.arrays[name], layer, head, model));
  return Plotly.restyle(element, { x: values("x"), y: values("y"), customdata: values("customdata") }, traces);
}

/** Explains an empty figure of the chosen head. */
const hasNumber = (values) => Array.from(values ?? []).some((value) => value?.length === undefined ? Number.isFinite(value) : hasNumber(value));
const EMPTY = { selectivity: "no plane of this head was measured", kernel: "no kernel was fitted to this head",
  attention: "this head has no attention on the excerpt", pair: "the profile does not have the queries and keys of this head",
  stopped: "the sweep did not measure this head", reach: "this head was not run" };
function explainIfEmpty(element) {
  element.dataset.empty = element._fullData.some(({ z, y }) => hasNumber(z ?? y)) ? "" : `no data: ${EMPTY[element.id.replace(/.*-/, "")]}`;
}

/** Moves the ring to the point of the chosen head, or hides it. */
function ring(element) {
  const data = element._fullData;
  const index = data.findIndex((trace) => trace.meta?.role === "selected");
  const pointOf = (trace) => [...(trace.customdata ?? [])]
    .findIndex((pair) => pair?.[0] === state.layer && pair?.[1] === state.head);
  const trace = data.find((trace) => !trace.meta?.role && pointOf(trace) >= 0);
  const changed = Object.fromEntries(["x", "y"].map((axis) => [axis, [trace ? [trace[axis][pointOf(trace)]] : []]]));
  return Plotly.restyle(element, changed, [index]);
}

/** Moves the frame of a head without plotly, which would draw all cells again. */
function frame(element, box, name = "selected") {
  const full = element._fullLayout;
  const index = element.layout.shapes.findIndex((shape) => shape.name === name);
  Object.assign(element.layout.shapes[index], box);
  const shape = Object.assign(full.shapes[index], box);
  const place = (ref, value) => {
    const axis = full[ref.replace(/^([xy])/, "$1axis")];
    return axis._offset + (axis.type === "log" ? axis.d2p(value) : axis.r2p(value));
  };
  const [left, right] = [place(shape.xref, shape.x0), place(shape.xref, shape.x1)];
  const [top, bottom] = [place(shape.yref, shape.y0), place(shape.yref, shape.y1)];
  element.querySelector(`.shapelayer path[data-index="${index}"]`)
    ?.setAttribute("d", `M${left},${top}H${right}V${bottom}H${left}Z`);
}

/** Colours the map by a column of the table instead of the label. Wavelengths use a log scale. */
function colorMap() {
  $("map-by").value = state.by;
  if (!drawn(plot("map")) || (plot("map").dataset.by ?? "") === state.by) return null;
  plot("map").dataset.by = state.by;
  const { value: column, selectedOptions: [{ textContent: words }] } = $("map-by");
  const data = plot("map").data, last = data.length - 1;
  const labels = data.map((_, i) => i).filter((i) => i < last && data[i].meta?.role !== "idle");
  Plotly.restyle(plot("map"), { visible: !column }, labels);
  if (!column) return Plotly.restyle(plot("map"), { visible: false }, [last]);
  const log = column === "top_wavelength";
  const z = page.rows.map((rows) => rows.map((row) => {
    const value = row < 0 ? NaN : number(column, row);
    return log ? Math.log10(value) : value;
  }));
  const title = words.replace(/[&<>$]/g, (character) => `&#${character.charCodeAt(0)};`);  // no tags for plotly
  const text = z.map((rows) => rows.map((value) => `${title} ${(log ? 10 ** value : value).toPrecision(3)}`));
  return Plotly.restyle(plot("map"), { visible: true, z: [z], text: [text], zmin: log ? null : 0, zauto: log,
    zmax: log ? null : Math.max(...z.flat().filter(Number.isFinite)),
    "colorbar.title.text": title,
    "colorbar.tickmode": log ? "array" : "auto", "colorbar.tickvals": [[0, 1, 2, 3, 4, 5, 6]], "colorbar.ticktext": [["1", "10", "100", "1k", "10k", "100k", "1M"]] }, [last]);
}
/** The heat map that `colorMap` fills. */
page.figures.map.data.push({ type: "heatmap", visible: false, z: [[]], colorscale: "Viridis", hoverongaps: false, xgap: 1, ygap: 1,
  hovertemplate: "L%{y} H%{x}<br>%{text}<extra></extra>",
  colorbar: { orientation: "h", thickness: 8, len: 0.9, y: -0.32, yanchor: "top", nticks: 5, title: { side: "top" } } });

/** Gives the first panel the same scale in both panes. */
const SCALED = ["selectivity", "kernel", "pair"];
async function oneScale(panes) {
  for (const element of panes) {
    if (!element.layout.yaxis.autorange) await Plotly.relayout(element, { "yaxis.autorange": true });
  }
  if (panes.length < 2) return;
  const ends = panes.flatMap((element) => element.layout.yaxis.range);
  for (const element of panes) await Plotly.relayout(element, { "yaxis.range": [Math.min(...ends), Math.max(...ends)] });
}

/** The heads with a frame: the chosen head, and the pinned head or an invisible place. */
const framed = () => [["pinned", state.pin ?? [-9, -9]], ["selected", [state.layer, state.head]]];
for (const { layout } of [page.figures.map, page.figures.wavelengths].filter(Boolean)) {
  const chosen = layout.shapes.find(({ name }) => name === "selected");
  layout.shapes.push({ ...chosen, name: "pinned", line: { ...chosen.line, dash: "dot" } });
}

/** Shows the chosen head (or the second head) in each figure. */
const SHOW = {
  wavelengths: (element) => {
    const rows = element.data.find(({ type }) => type === "heatmap").y;
    for (const [name, [layer, head]] of framed()) {
      const index = rows.indexOf(`L${layer} H${head}`), row = index < 0 ? -9 : index;  // -9 is not visible
      frame(element, { y0: row - 0.5, y1: row + 0.5 }, name);
    }
  },
  map: (element) => {
    for (const [name, [layer, head]] of framed()) {
      frame(element, { x0: head - 0.5, x1: head + 0.5, y0: layer - 0.5, y1: layer + 0.5 }, name);
    }
    return colorMap();
  },
  claim: ring,
  follow: ring,
  selectivity: (...shown) => {
    refill(...shown);
    return markBand(...shown);
  },
  kernel: (...shown) => {
    refill(...shown);
    return showDistances(...shown);
  },
  attention: showAttention, pair: showPair, stopped: showStopped, reach: showReach,
};

/** Chooses heads or pairs by clicks in each figure. */
const onClick = (use) => (element) => element.on("plotly_click", (event) => use(event.points[0]));
const chooseHead = onClick(({ customdata }) => customdata && choose(...customdata));
const CLICKS = {
  wavelengths: onClick(({ y }) => {
    const named = /^L(\d+) H(\d+)$/.exec(y);
    if (named) choose(Number(named[1]), Number(named[2]));
  }),
  map: onClick((point) => choose(point.y, point.x)),
  follow: chooseHead, top: chooseHead,
  patched_head: onClick((point) => choose(point.y, point.x)),
  claim: chooseHead,
  norms: onClick((point) => choose(point.y, state.head)),
  selectivity: (element) => element.on("plotly_selected", (event) => {
    const planes = event?.points.map((point) => point.pointNumber) ?? [];
    // Wait until plotly has finished the selection.
    setTimeout(() => Plotly.update(element, { selectedpoints: null }, { selections: [] }));
    if (planes.length) stopBand({ from: Math.min(...planes), to: Math.max(...planes), mode: state.mode });
  }),
  attention: (element) => {
    element.on("plotly_click", ({ points: [point] }) => choosePair(point.y, point.x, "pair"));
    element.on("plotly_hover", ({ points: [point] }) => describePair(point.y, point.x));
  },
};
page.figures.selectivity.layout.dragmode = "select";
page.figures.selectivity.layout.selectdirection = "h";
