// Saves figures as pictures or tables. Used by every page.
function save(name, text, type) {
  const link = document.createElement("a");
  link.download = name;
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000); // Firefox reads it later
}

// ---- tables

function csv(rows) {
  return rows.map((row) => `${row.map(csvCell).join(",")}\n`).join("");
}

function csvCell(value) {
  if (value === null || value === undefined || Number.isNaN(value)) {
    return "";
  }
  // A spreadsheet would run a formula.
  const isFormula = typeof value === "string" && /^[=+\-@\t\r]/.test(value);
  const text = isFormula ? `'${value}` : String(value);
  return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

const ENTITIES = { "&lt;": "<", "&gt;": ">", "&#36;": "$", "&amp;": "&" };

/** Undoes the escapes of text that was written for plotly. */
function plainText(text) {
  return String(text).replace(/&lt;|&gt;|&#36;|&amp;/g, (entity) => ENTITIES[entity]);
}

/** The numbers of a figure as CSV, with a row for each point or cell of a heat map. x is the number
 * on the axis (`meta.drawn_from` shifts drawn points). Pairs of tokens are named. */
function pointsOf(element) {
  const shift = element.layout.meta?.drawn_from ?? 0;
  const traces = element._fullData.filter(
    ({ visible, meta }) => visible === true && !meta?.role?.startsWith("sel"),
  );
  const hasPairs = traces.some(({ z, customdata }) => z && Array.isArray(customdata?.[0]?.[0]));
  const rows = [["trace", "x", "y", "value", ...(hasPairs ? ["query", "key"] : [])]];
  traces.forEach((trace, i) => {
    const name = plainText(trace.name || `trace ${i}`);
    const numbers = trace.z ? cellRows(trace, shift, hasPairs) : pointRows(trace, shift);
    for (const row of numbers) {
      // The other planes are in another trace.
      const isElsewhere = trace.meta?.planes && !Number.isFinite(row[1]);
      if (!isElsewhere) {
        rows.push([name, ...row]);
      }
    }
  });
  return csv(rows);
}

/** The number on the axis at which a point is. */
function onAxis(value, shift) {
  return typeof value === "number" ? value - shift : value;
}

/** x, y and value of each cell of a heat map, and its two tokens. */
function cellRows({ x, y, z, customdata }, shift, hasPairs) {
  const rows = [];
  z.forEach((values, row) => {
    Array.from(values).forEach((value, column) => {
      if (Number.isFinite(value)) {
        const tokens = hasPairs ? customdata[row][column].map(plainText) : [];
        const at = onAxis(x?.[column] ?? column, shift);
        rows.push([at, y?.[row] ?? row, value, ...tokens]);
      }
    });
  });
  return rows;
}

/** The coordinates of each point; a ternary plot has three. */
function pointRows({ x, y, a, b, c }, shift) {
  const firsts = Array.from(x ?? a ?? []);
  return firsts.map((first, i) => [onAxis(first, shift), (y ?? b)?.[i], c?.[i]]);
}

// ---- the buttons of a figure

const TABLE_ICON = {
  width: 1000,
  height: 1000,
  path:
    "M100 0h800v1000h-800zM200 150v120h600v-120zM200 370v120h600v-120z" + "M200 590v120h600v-120z",
};

/** Saves a figure on a white background. A PNG has three times the resolution of the screen. */
function savePicture({ data, layout, _fullLayout: { width, height } }, format, filename) {
  const onPaper = { ...layout, template: page.templates.light, paper_bgcolor: "#ffffff" };
  const scale = format === "png" ? 3 : 1;
  return Plotly.downloadImage(
    { data, layout: onPaper },
    { format, filename, width, height, scale },
  );
}

/** The buttons above a figure. They are listed here, because the default list of plotly has an
 * upload. */
function plotOptions(filename, title, more = []) {
  const suffix = title ? `: ${title}` : "";
  const pictures = ["svg", "png"].map((format) => ({
    name: `toImage ${format}`,
    title: `Save the picture (${format.toUpperCase()})${suffix}`,
    icon: Plotly.Icons.camera,
    click: (element) => savePicture(element, format, filename),
  }));
  const numbers = {
    name: "data",
    title: `Save the numbers (CSV)${suffix}`,
    icon: TABLE_ICON,
    click: (element) => save(`${filename}.csv`, pointsOf(element), "text/csv"),
  };
  return {
    displaylogo: false,
    responsive: true,
    showSendToCloud: false,
    plotlyServerURL: "",
    modeBarButtons: [...more, [...pictures, numbers]],
  };
}
