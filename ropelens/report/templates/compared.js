// One head of each of two compared runs or models. The address has the choice of the reader, as
// #heads=0.L2H3,1.L0H1: the numbers of the entries and the heads. The second head may be "same".
const SAME = "same";
const SIDES = ["first", "second"];
const compared = page.heads;

/** The chosen entries, and the chosen heads as "L2H3"; the second may be "same". */
const choice = { entries: [], heads: [] };

function chooseFirst() {
  const [first, second] = compared.chosen;
  choice.entries = [first.entry, second.entry];
  choice.heads = [`L${first.layer}H${first.head}`, `L${second.layer}H${second.head}`];
  if (choice.heads[0] === choice.heads[1]) {
    choice.heads[1] = SAME;
  }
}

/** The index of the chosen head of a side (0 or 1). The head may not exist. */
function indexOf(side) {
  const head = choice.heads[side] === SAME ? choice.heads[0] : choice.heads[side];
  const [layer, number] = head.match(/\d+/g).map(Number);
  return { entry: choice.entries[side], layer, head: number };
}

function exists({ entry, layer, head }) {
  return Boolean(compared.labels[entry]?.[layer]?.[head]);
}

// ---- menus

/** Lists the heads of the entry of a side by layer, with their labels. */
function listHeads(side) {
  const groups = [];
  compared.labels[choice.entries[side]].forEach((labels, layer) => {
    const options = [];
    labels.forEach((label, head) => {
      if (label) {
        options.push(option(`L${layer}H${head}`, `L${layer} H${head} ${label}`));
      }
    });
    if (options.length) {
      const group = document.createElement("optgroup");
      group.label = `Layer ${layer}`;
      group.append(...options);
      groups.push(group);
    }
  });
  if (side === 1) {
    groups.unshift(option(SAME, "same head"));
  }
  const index = indexOf(side);
  if (choice.heads[side] !== SAME && !exists(index)) {
    groups.unshift(option(choice.heads[side], `${nameOf(index)} does not exist`));
  }
  $(`${SIDES[side]}-head`).replaceChildren(...groups);
}

function showMenus() {
  SIDES.forEach((name, side) => {
    listHeads(side);
    $(`${name}-entry`).value = choice.entries[side];
    $(`${name}-head`).value = choice.heads[side];
  });
}

// ---- the figures and the table

/** The values of an axis of a trace for the head at an index; none if the head does not exist. */
function axisOf(trace, axis, index) {
  if (!exists(index)) {
    return [];
  }
  const { entry, layer, head } = index;
  const keyHead = compared.kvHeads[entry][layer][head];
  return part(compared.arrays[trace.meta[axis]], { ...index, kv_head: keyHead });
}

/** Shows the chosen heads in the menus, the figures and the table. */
async function showHeads() {
  const indices = [indexOf(0), indexOf(1)];
  showMenus();
  showNumbers(indices);
  linkPages(indices);
  for (const [side, index] of indices.entries()) {
    await showHead(plotOf(side), index);
  }
  for (const axis of ["yaxis", "yaxis2"]) {
    await oneScale([plotOf(0), plotOf(1)], axis);
  }
}

function plotOf(side) {
  return $(`plot-${SIDES[side]}`);
}

async function showHead(element, index) {
  const valuesOf = (axis) => element.data.map((trace) => axisOf(trace, axis, index));
  const customdata = valuesOf("customdata");
  const y = valuesOf("y").map((all, i) =>
    valuesOfPlanes(element.data[i].meta, all, customdata[i]),
  );
  const values = { x: valuesOf("x"), y, customdata };
  await Plotly.update(element, values, { "title.text": titleOf(index) });
  element.dataset.head = titleOf(index);
}

/** Links the pages on which the chosen heads are shown in full, if there are such pages. */
function linkPages(indices) {
  SIDES.forEach((name, side) => {
    const { entry, layer, head } = indices[side];
    const link = $(`${name}-page`);
    const address = page.map.pages[entry];
    link.hidden = !address || !exists(indices[side]);
    link.href = `${address}#L${layer}H${head}`;
  });
}

function titleOf(index) {
  const missing = exists(index) ? "" : " does not exist";
  return `${compared.titles[index.entry]}: ${nameOf(index)}${missing}`;
}

function nameOf({ layer, head }) {
  return `L${layer} H${head}`;
}

function showNumbers(indices) {
  for (const cell of document.querySelectorAll("#head-numbers [data-side]")) {
    const { side, number } = cell.dataset;
    const index = indices[Number(side)];
    const { entry, layer, head } = index;
    const numbers = number === "label" ? compared.labels : compared.numbers[number];
    cell.textContent = exists(index) ? numbers[entry][layer][head] : "–";
  }
}

// ---- the address

function remember() {
  const heads = choice.heads.map((head, side) => `${choice.entries[side]}.${head}`);
  history.pushState(null, "", `#heads=${heads.join(",")}`);
}

/** Reads the choice from the address. Other addresses leave the first choice. */
function recall() {
  chooseFirst();
  const read = /^#heads=(\d+)\.(L\d+H\d+),(\d+)\.(L\d+H\d+|same)$/.exec(location.hash);
  if (!read) {
    return;
  }
  const entries = [Number(read[1]), Number(read[3])];
  if (entries.every((entry) => entry < compared.labels.length)) {
    choice.entries = entries;
    choice.heads = [read[2], read[4]];
  }
}

SIDES.forEach((name, side) => {
  $(`${name}-entry`).addEventListener("change", ({ target }) => {
    choice.entries[side] = Number(target.value);
    remember();
    showHeads();
  });
  $(`${name}-head`).addEventListener("change", ({ target }) => {
    choice.heads[side] = target.value;
    remember();
    showHeads();
  });
});
addEventListener("popstate", () => {
  recall();
  showHeads();
});
await allDrawn;
recall();
showHeads();
