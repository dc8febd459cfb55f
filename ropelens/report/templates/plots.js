// Colors, scales and print of figures. Used by every page.
const dark = matchMedia("(prefers-color-scheme: dark)");

function theme() {
  return page.templates[dark.matches ? "dark" : "light"];
}

/** Gives an axis ("yaxis", "yaxis2", ...) of several figures the same range. */
async function oneScale(elements, axis) {
  for (const element of elements) {
    if (!element.layout[axis].autorange) {
      await Plotly.relayout(element, { [`${axis}.autorange`]: true });
    }
  }
  if (elements.length < 2) {
    return;
  }
  const ends = elements.flatMap((element) => element.layout[axis].range);
  const range = [Math.min(...ends), Math.max(...ends)];
  for (const element of elements) {
    await Plotly.relayout(element, { [`${axis}.range`]: range });
  }
}

/**
 * The values y of a trace whose `meta` may choose "rotating" or "stopped" planes; null for the
 * other planes. Planes that are stopped have an infinite wavelength.
 */
function valuesOfPlanes({ planes }, y, wavelengths) {
  if (!planes) {
    return y;
  }
  const stopped = planes === "stopped";
  return Array.from(y, (value, i) => ((wavelengths[i] === Infinity) === stopped ? value : null));
}

// ---- print

let printing = false;

function drawnFigures() {
  return document.querySelectorAll(".js-plotly-plot");
}

/** Scales the drawn figures to the width of the paper. */
function fitPaper() {
  for (const element of drawnFigures()) {
    if (dark.matches) {
      Plotly.relayout(element, { template: page.templates.light });
    }
    const { width, height } = element._fullLayout;
    element.style.setProperty("--shape", `${width} / ${height}`);
    for (const svg of element.querySelectorAll(".main-svg")) {
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    }
  }
}

addEventListener("beforeprint", () => {
  printing = true;
  fitPaper();
});
addEventListener("afterprint", () => {
  printing = false;
  for (const element of drawnFigures()) {
    if (dark.matches) {
      Plotly.relayout(element, { template: theme() });
    }
  }
  for (const svg of document.querySelectorAll(".main-svg")) {
    svg.removeAttribute("viewBox");
  }
});
