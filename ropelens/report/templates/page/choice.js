// Choosing heads, tabs and texts, and showing the choice in all views.

// ---- showing the choice

function choose(layer, head) {
  if (!headExists([layer, head])) {
    $("pick-layer").value = state.layer;
    $("pick-head").value = state.head;
    return;
  }
  $("head").classList.add("open");
  const { band } = state;
  const keepsBand = band && band.to < page.planes[layer];
  Object.assign(state, { layer, head, distance: null, band: keepsBand ? band : null });
  remember(true);
  show();
}

let nextFrame = 0;

/** Shows words at once, and figures once per frame: a held arrow key does not queue them. */
function show() {
  if (state.auto) {
    state.query = firstQuery();
  }
  describeHead();
  markRow(rowOf(state.layer, state.head));
  showTabs();
  listTokens();
  showBand();
  $("explore").setAttribute("aria-busy", "true");
  cancelAnimationFrame(nextFrame);
  nextFrame = requestAnimationFrame(refresh);
}

/** The visible panes of a figure with their heads: the chosen head, and the pinned head. */
function panesOf(name) {
  const panes = [{ element: plot(name), layer: state.layer, head: state.head }];
  const second = $(`pinned-${name}`);
  if (second && state.pin) {
    const [layer, head] = state.pin;
    panes.push({ element: second, layer, head });
  }
  return panes.filter(({ element }) => isSeen(element));
}

let lastCall = 0;

/** Draws or updates the visible figures. A later call stops an earlier one. */
async function refresh() {
  lastCall++;
  const call = lastCall;
  $("explore").setAttribute("aria-busy", "true");
  // Read all widths first, because the browser computes the layout again after each change.
  const figures = Object.keys(page.figures).map((name) => ({ name, panes: panesOf(name) }));
  for (const { panes } of figures) {
    for (const pane of panes) {
      pane.width = pane.element.clientWidth;
    }
  }
  for (const { name, panes } of figures) {
    for (const pane of panes) {
      await drawOrResize(name, pane);
      if (call !== lastCall) {
        return;
      }
      SHOW[name]?.(pane.element, pane.layer, pane.head);
    }
    if (SCALED.includes(name)) {
      const elements = panes.map(({ element }) => element);
      await oneScale(elements, "yaxis");
    }
  }
  showRest();
  $("explore").setAttribute("aria-busy", "false");
  document.documentElement.dataset.shown = writeHead([state.layer, state.head]);
}

async function drawOrResize(name, { element, layer, head, width }) {
  if (!isDrawn(element)) {
    await draw(name, element);
  } else if (Math.abs(element._fullLayout.width - width) > 1) {
    await Plotly.Plots.resize(element);
  }
  element.dataset.head = headName(layer, head);
}

/** Shows what is next to the figures. */
function showRest() {
  for (const element of $("head").querySelectorAll(".plot")) {
    if (isDrawn(element)) {
      explainIfEmpty(element);
    }
  }
  if (isSeen($("tokens"))) {
    showText();
  }
  if (isSeen($("pair-words"))) {
    describePair(state.query, keyOf(state.query));
  }
  showList(true);
  if (printing) {
    fitPaper();
  }
}

// ---- tabs, and the pinned head

const PANES = [
  { prefix: "all", key: "view", element: $("all") },
  { prefix: "one", key: "tab", element: $("head") },
];
const WITHOUT_PLANES = ["numbers", "stopped", "reach"]; // tabs in which no plane can be stopped

function tabsOf(pane) {
  return [...pane.element.querySelectorAll("[role=tab]")];
}

function showTabs() {
  for (const pane of PANES) {
    for (const tab of tabsOf(pane)) {
      const chosen = tab.dataset.tab === state[pane.key];
      tab.setAttribute("aria-selected", chosen);
      tab.tabIndex = chosen ? 0 : -1;
      $(`${pane.prefix}-${tab.dataset.tab}`).hidden = !chosen;
    }
  }
  const { pin, tab } = state;
  $("head").classList.toggle("pinned", Boolean(pin));
  $("pin").setAttribute("aria-pressed", Boolean(pin));
  $("pin").textContent = pin ? `Unpin ${headName(...pin)}` : "Pin";
  $("live").hidden = WITHOUT_PLANES.includes(tab);
}

function openTab(pane, tab) {
  state[pane.key] = tab.dataset.tab;
  showTabs();
  remember(false);
  refresh();
  tab.focus();
}

/** Index of the tab that a key opens, or undefined. */
function tabAfterKey(key, index) {
  return { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: -1 }[key];
}

for (const pane of PANES) {
  const tabs = tabsOf(pane);
  tabs.forEach((tab, i) => {
    tab.addEventListener("click", () => openTab(pane, tab));
    tab.addEventListener("keydown", (event) => {
      const next = tabAfterKey(event.key, i);
      if (next !== undefined) {
        event.preventDefault();
        openTab(pane, tabs.at(next % tabs.length));
      }
    });
  });
}
$("pin").addEventListener("click", () => {
  state.pin = state.pin ? null : [state.layer, state.head];
  remember(true);
  showTabs();
  refresh();
});

// ---- other ways to choose

/** Chooses the head of another row of the table, `by` rows further. */
function chooseNext(by) {
  const row = rowOf(state.layer, state.head) + by;
  choose(...places[(row + places.length) % places.length]);
}

const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
plot("map").addEventListener("keydown", (event) => {
  const step = STEPS[event.key];
  if (step) {
    event.preventDefault();
    choose(state.layer + step[0], state.head + step[1]);
  }
});
$("previous").addEventListener("click", () => chooseNext(-1));
$("next").addEventListener("click", () => chooseNext(1));
for (const id of ["pick-layer", "pick-head"]) {
  $(id).addEventListener("change", () => {
    choose(Number($("pick-layer").value), Number($("pick-head").value));
  });
}
$("map-by").addEventListener("change", ({ target: { value } }) => {
  state.by = value;
  remember(false);
  colorMap();
});
$("close").addEventListener("click", () => $("head").classList.remove("open"));

// ---- the start

/** Figures outside of the two panes are drawn last. */
function findFarFigures() {
  for (const name of Object.keys(page.figures)) {
    const element = plot(name);
    if (!$("explore").contains(element)) {
      setHeight(name, element);
      far.add(element);
    }
  }
}

function followColorScheme() {
  for (const element of document.querySelectorAll(".plot")) {
    if (isDrawn(element)) {
      Plotly.relayout(element, { template: theme() });
    }
  }
}

/** Shows the choice in the address; an empty address is the first choice. */
function followAddress() {
  if (!location.hash) {
    Object.assign(state, FIRST);
    $("head").classList.remove("open");
    show();
  } else if (recall()) {
    show();
  }
}

async function start() {
  await unpackPlotly();
  findFarFigures();
  addEventListener("beforeprint", () => {
    showList(false);
    drawFar();
  });
  dark.addEventListener("change", followColorScheme);
  recall();
  show();
  addEventListener("hashchange", followAddress);
  addEventListener("popstate", followAddress);
  document.documentElement.dataset.ready = "true";
  const whenIdle = window.requestIdleCallback ?? setTimeout; // Safari has no idle callbacks
  whenIdle(drawFar);
}
start();
