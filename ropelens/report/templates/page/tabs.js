// Tabs of the chosen head with a table of numbers below the figure.
function digits(value) {
  return Number.isFinite(value) ? value.toFixed(3) : "–";
}

function percent(share) {
  return Number.isNaN(share) ? "–" : `${Number((100 * share).toPrecision(3))}%`;
}

/** Fills the table of a tab. The first cell of a row is its heading. */
function fillTable(name, rows) {
  $(`rows-${name}`).replaceChildren(...rows.map(tableRow));
}

function tableRow(texts) {
  const row = document.createElement("tr");
  texts.forEach((text, column) => {
    const cell = document.createElement(column ? "td" : "th");
    cell.textContent = text;
    if (!column) {
      cell.scope = "row";
    }
    row.append(cell);
  });
  return row;
}

// ---- a sweep: the head as planes stop

const END_NAMES = { slow: "slowest", fast: "fastest" };

function showStopped(element, layer, head) {
  refill(element, layer, head);
  const ends = Object.keys(END_NAMES).filter((kind) => page.sweep[kind]);
  fillTable(
    "stopped",
    ends.flatMap((kind) => stoppedRows(kind, layer, head)),
  );
  return markLabels(element, ends, layer, head);
}

/** The values of a head at the steps of one end; none if they were not measured. */
function stepsOf(name, kind, layer, head) {
  const packed = page.arrays[`${name}_${kind}`];
  return packed ? [...partOfHead(packed, layer, head)] : [];
}

/** The labels of a head at the steps of one end. */
function labelSteps(kind, layer, head) {
  const numbers = stepsOf("label", kind, layer, head);
  return numbers.map((number) => page.labelOrder[number] ?? "–");
}

function stoppedRows(kind, layer, head) {
  const labels = labelSteps(kind, layer, head);
  const changes = stepsOf("attention_change", kind, layer, head);
  const inductions = stepsOf("induction", kind, layer, head);
  return page.sweep[kind].map((share, step) => [
    END_NAMES[kind],
    percent(share),
    labels[step] ?? "–",
    digits(changes[step]),
    digits(inductions[step]),
  ]);
}

/** Gives each mark the colour and the symbol of the label at its step. */
function markLabels(element, ends, layer, head) {
  const marked = [];
  const texts = [];
  element.data.forEach(({ meta }, i) => {
    for (const kind of ends) {
      const labels = labelSteps(kind, layer, head);
      if (labels.length && meta.y.endsWith(`_${kind}`)) {
        marked.push(i);
        texts.push(labels);
      }
    }
  });
  const looksOf = (look) => texts.map((labels) => labels.map(look));
  const changed = {
    "marker.color": looksOf((label) => page.colors[label] ?? "#80868d"),
    "marker.symbol": looksOf((label) => page.symbols[label] ?? "circle-open"),
    text: texts,
  };
  return Plotly.restyle(element, changed, marked);
}

// ---- reach: how often the head finds a copy, by distance

const REACH_COLUMNS = ["found_share", "found_low", "found_high", "foretold_share"];

function showReach(element, layer, head) {
  const rows = page.reach.variants.flatMap((variant) => reachRows(variant, layer, head));
  fillTable("reach", rows);
  $("reach-words").textContent = reachWords(rows);
  return refill(element, layer, head);
}

function reachRows(variant, layer, head) {
  const columns = REACH_COLUMNS.map((name) =>
    partOfHead(page.arrays[`${name} ${variant}`], layer, head),
  );
  return page.reach.distances.map((distance, i) => [
    variant,
    distance.toLocaleString("en"),
    ...columns.map((shares) => percent(shares[i])),
  ]);
}

/** Describes the shares of the model's own rotation, whose rows come first. */
function reachWords(rows) {
  const { variants, distances } = page.reach;
  const [, nearest, share] = rows[0];
  const [, farthest, shareOfFarthest] = rows[distances.length - 1];
  if (share === "–") {
    const shares = decode(page.arrays[`found_share ${variants[0]}`]);
    const run = shares.filter((found, i) => i % distances.length === 0 && found >= 0).length;
    return `This head is not among the ${run} heads that were run.`;
  }
  return (
    `The head finds ${share} of copies ${nearest} tokens back, ` +
    `and ${shareOfFarthest} of copies ${farthest} tokens back.`
  );
}
