// Saves figures as pictures or tables. Used by every page.
function save(name, text, type) {
  const link = Object.assign(document.createElement("a"), { download: name });
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);  // Firefox reads it later
}

/** Scales the drawn figures to the width of the paper. */
let printing = false;
function fitPaper() {
  for (const element of document.querySelectorAll(".js-plotly-plot")) {
    if (dark.matches) Plotly.relayout(element, { template: page.templates.light });
    const { width, height } = element._fullLayout;
    element.style.setProperty("--shape", `${width} / ${height}`);
    for (const svg of element.querySelectorAll(".main-svg")) svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  }
}
addEventListener("beforeprint", () => {
  printing = true;
  fitPaper();
});
addEventListener("afterprint", () => {
  printing = false;
  for (const element of document.querySelectorAll(".js-plotly-plot")) if (dark.matches) Plotly.relayout(element, { template: theme() });
  for (const svg of document.querySelectorAll(".main-svg")) svg.removeAttribute("viewBox");
});

const csv = (rows) => rows.map((row) => row.map((cell) => {
  const formula = typeof cell === "string" && /^[=+\-@\t\r]/.test(cell); // a spreadsheet would run it
  const text = cell === null || cell === undefined || Number.isNaN(cell) ? "" : (formula ? "'" : "") + cell;
  return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}).join(",")).join("\n") + "\n";

const ENTITIES = { "&lt;": "<", "&gt;": ">", "&#36;": "$", "&amp;": "&" };
/** Undoes the escapes of text that was written for plotly. */
const plain = (text) => String(text).replace(/&lt;|&gt;|&#36;|&amp;/g, (entity) => ENTITIES[entity]);

/** The numbers of a figure as CSV, with a row for each point or cell of a heat map.
 * x is the number on the axis (`meta.drawn_from` shifts drawn points). Pairs of tokens are named. */
function pointsOf(element) {
  const from = element.layout.meta?.drawn_from ?? 0;
  const shown = element._fullData.filter((trace) => trace.visible === true && !trace.meta?.role?.startsWith("sel"));
  const pairs = shown.some((trace) => trace.z && Array.isArray(trace.customdata?.[0]?.[0]));
  const rows = [["trace", "x", "y", "value", ...(pairs ? ["query", "key"] : [])]];
  const x = (value) => (typeof value === "number" ? value - from : value);
  shown.forEach((trace, i) => {
    const name = plain(trace.name || `trace ${i}`);
    if (trace.z) trace.z.forEach((row, y) => Array.from(row).forEach((value, at) =>
      Number.isFinite(value) && rows.push([name, x(trace.x?.[at] ?? at), trace.y?.[y] ?? y, value,
        ...(pairs ? trace.customdata[y][at].map(plain) : [])])));
    else Array.from(trace.x ?? trace.a ?? []).forEach((place, at) =>
      rows.push([name, x(place), (trace.y ?? trace.b)?.[at], trace.c?.[at]]));
  });
  return csv(rows);
}
const DATA = { width: 1000, height: 1000, path: "M100 0h800v1000h-800zM200 150v120h600v-120zM200 370v120h600v-120zM200 590v120h600v-120z" };

/** Saves a figure on a white background. A PNG has three times the resolution of the screen. */
function savePicture({ data, layout, _fullLayout: { width, height } }, format, filename) {
  const onPaper = { ...layout, template: page.templates.light, paper_bgcolor: "#ffffff" };
  return Plotly.downloadImage({ data, layout: onPaper }, { format, filename, width, height, scale: format === "png" ? 3 : 1 });
}

/** The buttons above a figure. They are listed here, because the default list of plotly has an upload. */
function plotOptions(filename, title, more = []) {
  const suffix = title ? `: ${title}` : "";
  const table = { name: "data", title: `Save the numbers (CSV)${suffix}`, icon: DATA,
    click: (element) => save(`${filename}.csv`, pointsOf(element), "text/csv") };
  const pictures = ["svg", "png"].map((format) => ({ name: `toImage ${format}`, icon: Plotly.Icons.camera,
    title: `Save the picture (${format.toUpperCase()})${suffix}`, click: (element) => savePicture(element, format, filename) }));
  return { displaylogo: false, responsive: true, showSendToCloud: false, plotlyServerURL: "",
    modeBarButtons: [...more, [...pictures, table]] };
}
