// The page's one script: draws the figures it was given, and keeps one chosen head
// the same in all of them, in the table, in the panel and in the address (#L3H5).
"use strict";
(() => {
  const page = JSON.parse(document.getElementById("payload").textContent);
  const { layer: layers, head: heads, kv_head: kvHeads } = page.sizes;
  const $ = (id) => document.getElementById(id);
  const plot = (name) => $(`plot-${name}`);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 720px)");
  /** Figures of the chosen head, with their names: those whose traces say which arrays they show. */
  const OF_HEAD = Object.fromEntries(Object.entries(page.figures)
    .filter(([, { data }]) => data.some(({ meta }) => meta && !meta.role))
    .map(([name]) => [name, plot(name).getAttribute("aria-label")]));
  const state = { layer: 0, head: 0, query: page.queries.length - 1, norms: "mean" };
  document.documentElement.classList.add("scripted");

  // ---- arrays: base64 to typed arrays, each once, when first asked for

  const decoded = new Map();
  function decode(packed) {
    if (!decoded.has(packed)) {
      const text = atob(packed.data);
      const bytes = new Uint8Array(text.length);
      for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
      decoded.set(packed, packed.dtype === "uint8" ? bytes : new Float32Array(bytes.buffer));
    }
    return decoded.get(packed);
  }

  /** The part of an array that belongs to a head: its leading dims are layer and (kv_)head. */
  function part(name, layer, head) {
    const packed = page.arrays[name];
    const index = { layer, head, kv_head: page.kvHeads[layer][head] };
    const size = packed.shape.slice(packed.dims.length).reduce((a, b) => a * b, 1);
    const at = packed.dims.reduce((flat, dim, i) => flat * packed.shape[i] + index[dim], 0);
    return decode(packed).subarray(at * size, (at + 1) * size);
  }

  /** Weights [query][key] of the excerpt, NaN ahead of the query; stored as 255 * root. */
  function attention(layer, head) {
    const bytes = part("attention", layer, head);
    let next = 0;
    return page.queries.map((query) => {
      const row = new Float32Array(page.tokens.length).fill(NaN);
      for (let key = 0; key <= query; key++) row[key] = (bytes[next++] / 255) ** 2;
      return row;
    });
  }

  /** Norms [layer][column] of one head or the mean over heads, as the figure's columns lie. */
  function norms(name) {
    const shared = page.arrays[name].dims[1] === "kv_head";
    return page.normColumns.map((planes, layer) => {
      if (state.norms === "head") {
        const values = part(name, layer, state.head);
        return planes.map((plane) => (plane < 0 ? null : values[plane]));
      }
      const shown = new Map();
      for (let head = 0; head < heads; head++) {
        const same = shared ? page.kvHeads[layer][head] : head;
        if (page.rows[layer][head] >= 0) shown.set(same, part(name, layer, head));
      }
      return planes.map((plane) => {
        if (plane < 0) return null;
        const kept = [...shown.values()].map((values) => values[plane]).filter(Number.isFinite);
        return kept.length ? kept.reduce((a, b) => a + b, 0) / kept.length : null;
      });
    });
  }

  const rowOf = (layer, head) => page.rows[layer][head];
  const shares = (row) => [...decode(page.shares).subarray(4 * row, 4 * row + 4)];
  const number = (column, row) => decode(page.columns[column])[row];

  // ---- figures

  /** The buttons over a figure, named one by one: plotly's own list has one that uploads. */
  function options(name) {
    const zoom = ["kernel", "selectivity", "claim"].includes(name);
    return { displaylogo: false, responsive: true, showSendToCloud: false, plotlyServerURL: "",
      displayModeBar: matchMedia("(hover: hover)").matches ? "hover" : false,
      modeBarButtons: [...(zoom ? [["zoom2d", "pan2d", "resetScale2d"]] : []), ["toImage"]],
      toImageButtonOptions: { format: "svg", filename: `ropelens-${name}` } };
  }

  function theme() { return page.templates[dark.matches ? "dark" : "light"]; }

  /** The height is the page's, the width follows the window: a figure fills its place. */
  function size(name) {
    const { height } = page.figures[name].layout;
    plot(name).style.height = `${(narrow.matches && NARROW[name]) || height}px`;
  }
  const NARROW = { kernel: 340, attention: 420 };

  /** Every token's name where there is room, every second or third where there is not. */
  function thinTicks() {
    const small = narrow.matches;
    const every = Math.ceil(page.tokens.length / (small ? 24 : 52));
    const { xaxis, yaxis } = page.figures.attention.layout;
    const kept = (_, i) => i % every === 0;
    return Plotly.relayout(plot("attention"), {
      "xaxis.tickvals": page.tokens.map((_, i) => i).filter(kept),
      "xaxis.ticktext": xaxis.ticktext.filter(kept),
      "yaxis.tickvals": page.queries.filter(kept), "yaxis.ticktext": yaxis.ticktext.filter(kept),
      "xaxis.tickfont.size": small ? 9 : 10, "yaxis.tickfont.size": small ? 9 : 10 });
  }

  async function draw(name) {
    // A copy: plotly writes into what it is given, and the originals are read again.
    const { data, layout } = structuredClone(page.figures[name]);
    delete layout.height;
    size(name);
    await Plotly.newPlot(plot(name), data, { ...layout, template: theme() }, options(name));
  }

  /** Refill the traces whose `meta` names arrays with those of the chosen head. */
  function refill(name) {
    const changed = {}, traces = [];
    plot(name).data.forEach((trace, i) => {
      if (!trace.meta || trace.meta.role) return;
      traces.push(i);
      for (const [axis, array] of Object.entries(trace.meta)) {
        const values = array === "attention" ? attention(state.layer, state.head)
          : part(array, state.layer, state.head);
        (changed[axis] ||= []).push(values);
      }
    });
    Plotly.restyle(plot(name), changed, traces);
  }

  /** Figures with a point a head, whose ring is put around the chosen one: none, where it has no point. */
  const RINGED = Object.keys(page.figures)
    .filter((name) => page.figures[name].data.some(({ meta }) => meta?.role === "selected"));
  function ring(name) {
    const data = plot(name)._fullData;
    const index = data.findIndex((trace) => trace.meta?.role === "selected");
    const axes = data[index].type === "scatterternary" ? ["a", "b", "c"] : ["x", "y"];
    const at = (trace) => [...(trace.customdata ?? [])]
      .findIndex((pair) => pair?.[0] === state.layer && pair?.[1] === state.head);
    const own = data.find((trace) => !trace.meta?.role && at(trace) >= 0);
    const changed = Object.fromEntries(axes.map((axis) => [axis, [own ? [own[axis][at(own)]] : []]]));
    Plotly.restyle(plot(name), changed, [index]);
  }

  function frame(name, box) {
    const at = plot(name).layout.shapes.findIndex((shape) => shape.name === "selected");
    const changed = Object.entries(box).map(([key, value]) => [`shapes[${at}].${key}`, value]);
    Plotly.relayout(plot(name), Object.fromEntries(changed));
  }

  /** The map by a number of each head in place of its label; wavelengths by their powers of ten. */
  function colorMap() {
    const { value: column, selectedOptions: [{ textContent: words }] } = $("map-by");
    const data = plot("map").data, last = data.length - 1;
    const labels = data.map((_, i) => i).filter((i) => i < last);
    Plotly.restyle(plot("map"), { visible: !column }, labels);
    if (!column) return Plotly.restyle(plot("map"), { visible: false }, [last]);
    const log = column === "top_wavelength";
    const z = page.rows.map((rows) => rows.map((row) => {
      const value = row < 0 ? NaN : number(column, row);
      return log ? Math.log10(value) : value;
    }));
    const ticks = log ? { tickvals: [0, 1, 2, 3, 4, 5, 6], ticktext: ["1", "10", "100", "1k", "10k", "100k", "1M"] } : {};
    const text = z.map((rows) => rows.map((value) => `${words} ${(log ? 10 ** value : value).toPrecision(3)}`));
    return Plotly.restyle(plot("map"), { visible: true, z: [z], text: [text], zmin: log ? null : 0, zauto: log,
      zmax: log ? null : Math.max(...z.flat().filter(Number.isFinite)),
      "colorbar.tickmode": log ? "array" : "auto", "colorbar.tickvals": [ticks.tickvals], "colorbar.ticktext": [ticks.ticktext] }, [last]);
  }
  /** What it is drawn with, empty until asked for. */
  const BY_NUMBER = { type: "heatmap", visible: false, z: [[]], colorscale: "Viridis", hoverongaps: false, xgap: 1, ygap: 1,
    hovertemplate: "L%{y} H%{x}<br>%{text}<extra></extra>",
    colorbar: { orientation: "h", thickness: 8, len: 0.9, y: -0.32, yanchor: "top", nticks: 5 } };
  page.figures.map.data.push(BY_NUMBER);

  function showNorms() {
    const kvHead = page.kvHeads[state.layer][state.head];
    $("norms-head").textContent = `head ${state.head} of every layer`
      + (kvHeads < heads ? ` (its keys: key-value head ${kvHead})` : "");
    const z = page.normNames.map(norms);
    const zmax = z.map((rows) => Math.max(...rows.flat()));
    Plotly.restyle(plot("norms"), { z, zmax }, page.normNames.map((_, i) => i));
  }

  // ---- the chosen head

  function choose(layer, head) {
    if (!(page.rows[layer]?.[head] >= 0)) return;
    Object.assign(state, { layer, head });
    // The address follows every choice but the one that the page opens with.
    if (document.documentElement.dataset.ready) history.replaceState(null, "", `#L${layer}H${head}`);
    const row = rowOf(layer, head);
    describe(row);
    markRow(row);
    // Words at once; figures once a frame, so that a held arrow key does not queue them up.
    cancelAnimationFrame(drawing);
    drawing = requestAnimationFrame(() => redraw(row));
  }

  let drawing = 0;
  function redraw(row) {
    const { layer, head } = state;
    if (page.figures.wavelengths) {
      const at = plot("wavelengths").data.find(({ type }) => type === "heatmap").y.indexOf(`L${layer} H${head}`);
      frame("wavelengths", { y0: at - 0.5, y1: at + 0.5, visible: at >= 0 });
    }
    frame("map", { x0: head - 0.5, x1: head + 0.5, y0: layer - 0.5, y1: layer + 0.5 });
    RINGED.forEach(ring);
    for (const name of Object.keys(OF_HEAD)) refill(name);
    showNorms();
    showQuery();
    document.documentElement.dataset.shown = `L${layer}H${head}`;
  }

  function describe(row) {
    const { layer, head } = state;
    const label = page.labels[row];
    const cells = tableRows[row].cells;
    const [offset, low, high] = ["offset", "offset_low", "offset_high"].map((name) => number(name, row));
    const looks = !Number.isNaN(offset) ? `, offset ${offset}`
      : Number.isNaN(low) ? "" : `, offsets ${low} to ${high}`;
    const total = number("total_bits", row);
    $("pick-layer").value = layer;
    $("pick-head").value = head;
    const glyph = cells[1].querySelector(".glyph").cloneNode(true);
    const name = Object.assign(document.createElement("b"), { textContent: `L${layer} H${head} ` });
    const what = ` ${label}${looks}, ${total.toFixed(2)} bits: `;
    $("head-title").textContent = `Layer ${layer}, head ${head}: ${label}`;
    const parts = shares(row);
    const names = ["sink", "position", "content", "both at once"];
    $("budget").querySelectorAll("span").forEach((bar, i) => { bar.style.flexGrow = parts[i] || 0; bar.hidden = !(parts[i] >= 0.005); });
    const split = names.map((part, i) => `${part} ${Math.round(100 * (parts[i] || 0))}%`).join(", ");
    $("now").replaceChildren(name, glyph, what, split);
    for (const [name, words] of Object.entries(OF_HEAD)) {
      plot(name).setAttribute("aria-label", `${words}: layer ${layer}, head ${head}`);
    }
    document.querySelectorAll("#numbers [data-column]").forEach((cell) => {
      cell.textContent = cells[Number(cell.dataset.column) + 2].textContent;
    });
  }

  // ---- the excerpt as text

  const tokens = page.tokens.map((token, i) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = token;
    const query = page.queries.indexOf(i);
    button.disabled = query < 0;
    button.addEventListener("click", () => { state.query = query; showQuery(); });
    return button;
  });
  $("tokens").append(...tokens);

  function showQuery() {
    const row = attention(state.layer, state.head)[state.query];
    const query = page.queries[state.query];
    const color = page.colors[page.labels[rowOf(state.layer, state.head)]];
    tokens.forEach((button, i) => {
      const shade = Math.round(70 * Math.sqrt(row[i] || 0));
      button.style.background = `color-mix(in srgb, ${color} ${shade}%, transparent)`;
      button.classList.toggle("ahead", i > query);
      button.setAttribute("aria-pressed", i === query);
    });
    const code = (i) => Object.assign(document.createElement("code"), { textContent: page.tokens[i] });
    const best = [...row.keys()].filter((i) => row[i] >= 0.005).sort((a, b) => row[b] - row[a]).slice(0, 4);
    const parts = best.flatMap((i, n) => {
      const back = i === query ? "itself" : i === 0 ? "first" : `${query - i} back`;
      return [n ? ", " : "", code(i), ` ${Math.round(100 * row[i])}% (${back})`];
    });
    $("looks").replaceChildren(code(query), " looks at ", ...(parts.length ? parts : ["nothing much"]), ".");
  }

  // ---- the table

  const table = $("table");
  const body = table.tBodies[0];
  const tableRows = [...body.rows];

  function markRow(row) {
    body.querySelector("[aria-current]")?.removeAttribute("aria-current");
    tableRows[row].setAttribute("aria-current", "true");
  }

  function sortBy(key, header) {
    const down = header.getAttribute("aria-sort") === "ascending";
    const value = (row) => key === "head" ? row : key === "label"
      ? page.labelOrder.indexOf(page.labels[row]) : number(key, row);
    const order = tableRows.map((_, row) => row).sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y) || a - b;
      return (down ? y - x : x - y) || a - b;
    });
    table.querySelectorAll("th[aria-sort]").forEach((th) => th.removeAttribute("aria-sort"));
    header.setAttribute("aria-sort", down ? "descending" : "ascending");
    body.append(...order.map((row) => tableRows[row]));
  }

  function filter() {
    const shown = new Set([...$("filters").querySelectorAll("[name=label]:checked")].map((box) => box.value));
    const words = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of tableRows) {
      const text = `${row.cells[0].textContent} ${row.dataset.label}`.toLowerCase().split(" ");
      const found = words.every((word) => /^[lh]\d+$/.test(word) ? text.includes(word)
        : text.some((part) => part.startsWith(word)) || text.slice(0, 2).join("") === word);
      row.hidden = !(shown.has(row.dataset.label) && found);
      count += !row.hidden;
    }
    $("count").textContent = `${count} of ${tableRows.length} heads`;
  }

  function place(row) {
    const flat = page.rows.flat().indexOf(row);
    return [Math.floor(flat / heads), flat % heads];
  }

  table.tHead.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) sortBy(button.dataset.sort, button.closest("th"));
  });
  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (!row) return;
    event.preventDefault();
    choose(...place(Number(row.dataset.row)));
  });
  body.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    const next = event.key === "ArrowDown" ? "nextElementSibling" : "previousElementSibling";
    let row = event.target.closest("tr")[next];
    while (row?.hidden) row = row[next];
    if (!row) return;
    event.preventDefault();
    row.querySelector("a").focus();
  });
  $("filters").addEventListener("input", filter);
  $("filters").addEventListener("submit", (event) => event.preventDefault());

  // ---- other ways to choose

  function step(by) {
    const row = rowOf(state.layer, state.head) + by;
    choose(...place((row + tableRows.length) % tableRows.length));
  }

  const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  plot("map").addEventListener("keydown", (event) => {
    const move = steps[event.key];
    if (!move) return;
    event.preventDefault();
    choose(state.layer + move[0], state.head + move[1]);
  });
  $("previous").addEventListener("click", () => step(-1));
  $("next").addEventListener("click", () => step(1));
  for (const id of ["pick-layer", "pick-head"]) {
    $(id).addEventListener("change", () => choose(Number($("pick-layer").value), Number($("pick-head").value)));
  }
  document.querySelectorAll("[name=norms]").forEach((radio) => {
    radio.addEventListener("change", () => { state.norms = radio.value; showNorms(); });
  });

  function fromAddress() {
    const match = /^#L(\d+)H(\d+)$/.exec(location.hash);
    if (match) choose(Number(match[1]), Number(match[2]));
    return Boolean(match);
  }

  async function start() {
    await unpackPlotly();
    for (const name of Object.keys(page.figures)) await draw(name);
    await thinTicks();
    const onClick = (name, use) => plot(name).on("plotly_click", (event) => use(event.points[0]));
    onClick("map", (point) => choose(point.y, point.x));
    if (page.figures.wavelengths) {
      onClick("wavelengths", ({ y }) => {
        const named = /^L(\d+) H(\d+)$/.exec(y);
        if (named) choose(Number(named[1]), Number(named[2]));
      });
    }
    $("map-by").addEventListener("change", colorMap);
    for (const name of RINGED) {
      if (name !== "triangle") onClick(name, ({ customdata }) => customdata && choose(...customdata));
    }
    // Without a drag mode plotly tells of no clicks in a triangle, only of what is hovered.
    let over = null;
    plot("triangle").on("plotly_hover", (event) => { over = event.points[0].customdata; });
    plot("triangle").on("plotly_unhover", () => { over = null; });
    plot("triangle").addEventListener("click", () => over && choose(...over));
    onClick("norms", (point) => choose(point.y, state.head));
    onClick("attention", (point) => { state.query = page.queries.indexOf(point.y); showQuery(); });
    dark.addEventListener("change", () => {
      for (const name of Object.keys(page.figures)) Plotly.relayout(plot(name), { template: theme() });
    });
    narrow.addEventListener("change", () => {
      for (const name of Object.keys(NARROW)) size(name);
      thinTicks();
    });
    filter();
    fromAddress() || choose(...page.selected);
    addEventListener("hashchange", fromAddress);
    document.documentElement.dataset.ready = "true";
  }
  start();
})();
