/* Draws the figures of the payload. Draws them again if the color scheme changes. */
const [page] = await unpackPayload();
const dark = matchMedia("(prefers-color-scheme: dark)");
const plot = (index) => document.getElementById(`plot-${index}`);
const theme = () => page.templates[dark.matches ? "dark" : "light"];

async function drawAll() {
  await unpackPlotly();
  for (const [index, figure] of page.figures.entries()) {
    const { data, layout } = structuredClone(figure);
    plot(index).style.height = `${layout.height}px`;
    delete layout.height;
    // Panels side by side are too wide for a phone.
    const wide = Object.entries(layout).some(([name, axis]) => name.startsWith("xaxis") && axis.title?.text && axis.domain?.[1] < 0.6);
    plot(index).classList.toggle("wide", wide);
    await Plotly.newPlot(plot(index), data, { ...layout, template: theme() }, plotOptions(`ropelens-${index}`));
  }
  dark.addEventListener("change", () => page.figures.forEach((_, index) =>
    Plotly.relayout(plot(index), { template: theme() })));
  document.documentElement.classList.add("ready");
}
drawAll();
