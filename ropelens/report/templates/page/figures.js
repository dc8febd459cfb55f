// Draws each figure when its tab is first shown, and then fills in the data of the chosen head.
function plot(name) {
  return $(`plot-${name}`);
}

function isDrawn(element) {
  return Boolean(element.data);
}

// ---- drawing

/** Figures below the two panes. They are drawn when the browser is idle, or for print. */
const far = new Set();

function drawFar() {
  if (far.size) {
    far.clear();
    refresh();
  }
}

function isSeen(element) {
  return element.offsetParent !== null && !far.has(element);
}

/** Sets the height of a figure. Its width follows the window. */
function setHeight(name, element) {
  element.style.height = `${page.figures[name].layout.height}px`;
}

const WITH_ZOOM = ["kernel", "claim", "follow", "pair"];

function optionsOf(name) {
  const zoom = WITH_ZOOM.includes(name) ? [["zoom2d", "pan2d", "resetScale2d"]] : [];
  const title = $(`${name}-title`)?.textContent;
  return {
    ...plotOptions(`ropelens-${name}`, title, zoom),
    displayModeBar: matchMedia("(hover: hover)").matches ? "hover" : false,
  };
}

async function draw(name, element) {
  // Copy, because plotly changes its arguments.
  const { data, layout } = structuredClone(page.figures[name]);
  delete layout.height;
  layout.template = theme();
  setHeight(name, element);
  await Plotly.newPlot(element, data, layout, optionsOf(name));
  ON_DRAWN[name]?.(element);
}

/** Fills the traces with the arrays of a head that their `meta` names. */
function refill(element, layer, head) {
  const filled = [];
  element.data.forEach(({ meta }, i) => {
    if (meta && !meta.role) {
      filled.push(i);
    }
  });
  const valuesOf = (axis) =>
    filled.map((i) => {
      const name = element.data[i].meta[axis];
      return name && partOfHead(page.arrays[name], layer, head);
    });
  const customdata = valuesOf("customdata");
  const y = valuesOf("y").map((all, i) =>
    valuesOfPlanes(element.data[filled[i]].meta, all, customdata[i]),
  );
  const changed = { x: valuesOf("x"), y, customdata };
  return Plotly.restyle(element, changed, filled);
}

const WHY_EMPTY = {
  selectivity: "no plane of this head was measured",
  kernel: "no kernel was fitted to this head",
  attention: "this head has no attention on the excerpt",
  pair: "the profile does not have the queries and keys of this head",
  stopped: "the sweep did not measure this head",
  reach: "this head was not run",
};

/** Whether a list, or a list of lists, has a finite number. */
function hasNumber(values) {
  return Array.from(values ?? []).some((value) =>
    value?.length === undefined ? Number.isFinite(value) : hasNumber(value),
  );
}

/** Explains an empty figure of the chosen head. */
function explainIfEmpty(element) {
  const filled = element._fullData.some(({ z, y }) => hasNumber(z ?? y));
  const name = element.id.replace(/.*-/, "");
  element.dataset.empty = filled ? "" : `no data: ${WHY_EMPTY[name]}`;
}

// ---- the marks of the chosen head in figures of all heads

/** Moves the ring to the point of the chosen head, or hides it. */
function moveRing(element) {
  const traces = element._fullData;
  const ring = traces.findIndex(({ meta }) => meta?.role === "selected");
  const position = { x: [], y: [] };
  for (const trace of traces) {
    const point = trace.meta?.role ? -1 : pointOfHead(trace);
    if (point >= 0 && !position.x.length) {
      position.x.push(trace.x[point]);
      position.y.push(trace.y[point]);
    }
  }
  return Plotly.restyle(element, { x: [position.x], y: [position.y] }, [ring]);
}

/** Index of the point of the chosen head in a trace, or -1. */
function pointOfHead(trace) {
  const heads = [...(trace.customdata ?? [])];
  return heads.findIndex((head) => head?.[0] === state.layer && head?.[1] === state.head);
}

/** Position of a value on an axis, in pixels of the figure. */
function pixelOf(layout, reference, value) {
  const axis = layout[reference.replace(/^([xy])/, "$1axis")];
  return axis._offset + (axis.type === "log" ? axis.d2p(value) : axis.r2p(value));
}

/** Moves the frame of a head without plotly, which would draw all cells again. */
function moveFrame(element, name, box) {
  const layout = element._fullLayout;
  const index = element.layout.shapes.findIndex((shape) => shape.name === name);
  const shape = layout.shapes[index];
  Object.assign(element.layout.shapes[index], box);
  Object.assign(shape, box);
  const left = pixelOf(layout, shape.xref, shape.x0);
  const right = pixelOf(layout, shape.xref, shape.x1);
  const top = pixelOf(layout, shape.yref, shape.y0);
  const bottom = pixelOf(layout, shape.yref, shape.y1);
  const path = element.querySelector(`.shapelayer path[data-index="${index}"]`);
  path?.setAttribute("d", `M${left},${top}H${right}V${bottom}H${left}Z`);
}

const NOWHERE = -9; // a layer, a head or a row outside of the figure

/** The heads with a frame by the names of the frames. */
function framedHeads() {
  return [
    ["pinned", state.pin ?? [NOWHERE, NOWHERE]],
    ["selected", [state.layer, state.head]],
  ];
}

function addFrameOfPinned(figure) {
  const selected = figure.layout.shapes.find(({ name }) => name === "selected");
  const line = { ...selected.line, dash: "dot" };
  figure.layout.shapes.push({ ...selected, name: "pinned", line });
}

function frameRows(element) {
  const rows = element.data.find(({ type }) => type === "heatmap").y;
  for (const [name, [layer, head]] of framedHeads()) {
    const index = rows.indexOf(headName(layer, head));
    const row = index < 0 ? NOWHERE : index;
    moveFrame(element, name, { y0: row - 0.5, y1: row + 0.5 });
  }
}

function frameCells(element) {
  for (const [name, [layer, head]] of framedHeads()) {
    const box = { x0: head - 0.5, x1: head + 0.5, y0: layer - 0.5, y1: layer + 0.5 };
    moveFrame(element, name, box);
  }
  return colorMap();
}

// ---- colours of the map of heads

const POWERS = [0, 1, 2, 3, 4, 5, 6];
const NAMES_OF_POWERS = ["1", "10", "100", "1k", "10k", "100k", "1M"];

/** The heat map that `colorMap` fills. */
const NUMBERS_OF_HEADS = {
  type: "heatmap",
  visible: false,
  z: [[]],
  colorscale: "Viridis",
  hoverongaps: false,
  xgap: 1,
  ygap: 1,
  hovertemplate: "L%{y} H%{x}<br>%{text}<extra></extra>",
  colorbar: {
    orientation: "h",
    thickness: 8,
    len: 0.9,
    y: -0.32,
    yanchor: "top",
    nticks: 5,
    title: { side: "top" },
  },
};

/** Colours the map by a column of the table instead of the label. */
function colorMap() {
  $("map-by").value = state.by;
  const map = plot("map");
  if (!isDrawn(map) || (map.dataset.by ?? "") === state.by) {
    return null;
  }
  map.dataset.by = state.by;
  const last = map.data.length - 1;
  const labels = [];
  map.data.forEach(({ meta }, i) => {
    if (i < last && meta?.role !== "idle") {
      labels.push(i);
    }
  });
  const column = $("map-by").value;
  Plotly.restyle(map, { visible: !column }, labels);
  if (!column) {
    return Plotly.restyle(map, { visible: false }, [last]);
  }
  return Plotly.restyle(map, colorsBy(column), [last]);
}

/** The heat map of the numbers of a column. Wavelengths use a log scale. */
function colorsBy(column) {
  const onLog = column === "top_wavelength";
  const numbers = page.rows.map((rows) =>
    rows.map((row) => (row < 0 ? NaN : numberAt(column, row))),
  );
  const z = numbers.map((values) => values.map((value) => (onLog ? Math.log10(value) : value)));
  const words = $("map-by").selectedOptions[0].textContent;
  const title = words.replace(/[&<>$]/g, (character) => `&#${character.charCodeAt(0)};`);
  const text = z.map((values) =>
    values.map((value) => `${title} ${(onLog ? 10 ** value : value).toPrecision(3)}`),
  );
  return {
    visible: true,
    z: [z],
    text: [text],
    zauto: onLog,
    zmin: onLog ? null : 0,
    zmax: onLog ? null : Math.max(...z.flat().filter(Number.isFinite)),
    "colorbar.title.text": title,
    "colorbar.tickmode": onLog ? "array" : "auto",
    "colorbar.tickvals": [POWERS],
    "colorbar.ticktext": [NAMES_OF_POWERS],
  };
}

const SCALED = ["selectivity", "kernel", "pair"]; // the same scale for the pinned head

// ---- what each figure does

/** Shows a head in each figure. */
const SHOW = {
  wavelengths: frameRows,
  map: frameCells,
  claim: moveRing,
  follow: moveRing,
  selectivity: showSelectivity,
  kernel: showKernel,
  attention: showAttention,
  pair: showPair,
  stopped: showStopped,
  reach: showReach,
};

/** Reads clicks in each figure. */
const ON_DRAWN = {
  wavelengths: (element) => onClick(element, chooseRow),
  map: (element) => onClick(element, chooseCell),
  follow: (element) => onClick(element, choosePoint),
  top: (element) => onClick(element, choosePoint),
  patched_head: (element) => onClick(element, chooseCell),
  claim: (element) => onClick(element, choosePoint),
  norms: (element) => onClick(element, (point) => choose(point.y, state.head)),
  selectivity: (element) => element.on("plotly_selected", (event) => stopSelected(element, event)),
  attention: (element) => {
    onClick(element, (point) => choosePair(point.y, point.x, "pair"));
    element.on("plotly_hover", ({ points }) => describePair(points[0].y, points[0].x));
  },
};

function onClick(element, use) {
  element.on("plotly_click", ({ points }) => use(points[0]));
}

function chooseCell(point) {
  choose(point.y, point.x);
}

function choosePoint(point) {
  if (point.customdata) {
    choose(...point.customdata);
  }
}

function chooseRow(point) {
  const match = /^L(\d+) H(\d+)$/.exec(point.y);
  if (match) {
    choose(Number(match[1]), Number(match[2]));
  }
}

/** Stops the planes that were selected with the pointer. */
function stopSelected(element, event) {
  const planes = event?.points.map((point) => point.pointNumber) ?? [];
  // Wait until plotly has finished the selection.
  setTimeout(() => {
    Plotly.update(element, { selectedpoints: null }, { selections: [] });
  });
  if (planes.length) {
    stopBand({ from: Math.min(...planes), to: Math.max(...planes), mode: state.mode });
  }
}

page.figures.map.data.push(NUMBERS_OF_HEADS);
addFrameOfPinned(page.figures.map);
if (page.figures.wavelengths) {
  addFrameOfPinned(page.figures.wavelengths);
}
page.figures.selectivity.layout.dragmode = "select";
page.figures.selectivity.layout.selectdirection = "h";
