// Draws the figures of the payload, and draws them again if the color scheme changes.
/** Whether panels are side by side, which is too wide for a phone. */
function isWide(layout) {
  return Object.entries(layout).some(
    ([name, axis]) => name.startsWith("xaxis") && axis.title?.text && axis.domain?.[1] < 0.6,
  );
}

async function drawFigure(name, figure) {
  const element = $(`plot-${name}`);
  const { data, layout } = structuredClone(figure);
  element.style.height = `${layout.height}px`;
  delete layout.height;
  element.classList.toggle("wide", isWide(layout));
  layout.template = theme();
  await Plotly.newPlot(element, data, layout, plotOptions(`ropelens-${name}`));
}

async function drawAll() {
  await unpackPlotly();
  for (const [name, figure] of Object.entries(page.figures)) {
    await drawFigure(name, figure);
  }
  dark.addEventListener("change", () => {
    for (const name of Object.keys(page.figures)) {
      Plotly.relayout($(`plot-${name}`), { template: theme() });
    }
  });
  document.documentElement.classList.add("ready");
}

const allDrawn = drawAll();
