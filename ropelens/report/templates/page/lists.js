// The table of heads. Only the visible rows and one screen of other rows are in the document.
const ROW = 30; // height in pixels, as in page.css

const list = $("list");

// Each row is a line of text, which is parsed at its first use, because a thousand rows take long.
const [tableText, ...rowTexts] = $("whole-table").textContent.split(/^(?=<tr data-row)/m);
const table = new DOMParser().parseFromString(tableText, "text/html").querySelector("table");
const body = table.tBodies[0];
const parsedRows = new Map();

function rowAt(row) {
  if (!parsedRows.has(row)) {
    const template = document.createElement("template");
    template.innerHTML = rowTexts[row];
    parsedRows.set(row, template.content.querySelector("tr"));
  }
  return parsedRows.get(row);
}

/** An empty row for the space above or below the rows. */
function gapRow() {
  const gap = document.createElement("tr");
  gap.className = "gap";
  gap.ariaHidden = "true";
  gap.innerHTML = `<td colspan="${rowAt(0).cells.length}">`;
  return gap;
}

const gapAbove = gapRow();
const gapBelow = gapRow();
body.append(gapAbove, gapBelow);
table.tHead.rows[0].setAttribute("aria-rowindex", 1);
list.append(table);

let sortedRows = [...rowTexts.keys()];
let listedRows = sortedRows;
let currentRow = rowAt(0);

// ---- visible rows

/** Shows the visible rows, or all rows for print. `follow` scrolls to the chosen row. */
function showList(follow) {
  if (!isSeen(list)) {
    return;
  }
  if (follow) {
    scrollToChosen();
  }
  const focused = document.activeElement;
  const { begin, end } = visibleRange();
  gapAbove.cells[0].style.height = `${begin * ROW}px`;
  gapBelow.cells[0].style.height = `${(listedRows.length - end) * ROW}px`;
  placeRows(listedRows.slice(begin, end), begin);
  table.setAttribute("aria-rowcount", listedRows.length + 1);
  keepFocus(focused);
}

function scrollToChosen() {
  const height = list.clientHeight - table.tHead.offsetHeight;
  const top = ROW * listedRows.indexOf(rowOf(state.layer, state.head));
  if (top < list.scrollTop || top + ROW > list.scrollTop + height) {
    list.scrollTop = top - height / 2;
  }
}

/** The first row that is in the document, and the end of these rows. */
function visibleRange() {
  if (printing) {
    return { begin: 0, end: listedRows.length };
  }
  const height = list.clientHeight - table.tHead.offsetHeight;
  const screen = Math.ceil(height / ROW);
  const first = Math.floor(list.scrollTop / ROW);
  return {
    begin: Math.max(0, first - screen),
    end: Math.min(listedRows.length, first + 2 * screen),
  };
}

/** Puts rows into the document. A click may have begun on a row, so rows that stay do not move. */
function placeRows(rows, begin) {
  for (const element of [...body.rows]) {
    const { row } = element.dataset;
    if (row && !rows.includes(Number(row))) {
      element.remove();
    }
  }
  let before = gapAbove;
  rows.forEach((row, i) => {
    const element = rowAt(row);
    if (before.nextSibling !== element) {
      before.after(element);
    }
    element.setAttribute("aria-rowindex", begin + i + 2);
    before = element;
  });
}

/** Keeps the focus in the list if the row that had it has gone. */
function keepFocus(focused) {
  if (!focused.isConnected) {
    list.focus({ preventScroll: true });
  } else if (list.contains(focused)) {
    focused.focus({ preventScroll: true });
  }
}

function markRow(row) {
  currentRow.removeAttribute("aria-current");
  currentRow = rowAt(row);
  currentRow.setAttribute("aria-current", "true");
}

// ---- order and filters

/** Sorts numbers from the largest and names from the first; a second click reverses. */
function sortBy(column, header) {
  const before = header.getAttribute("aria-sort");
  const isName = column === "head" || column === "label";
  const descending = isName ? before === "ascending" : before !== "descending";
  sortedRows = [...rowTexts.keys()].sort((a, b) => compareRows(a, b, column, descending));
  for (const other of table.querySelectorAll("th[aria-sort]")) {
    other.removeAttribute("aria-sort");
  }
  header.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const name = header.innerText.replace(/\s+/g, " ");
  $("column-words").textContent = header.title ? `${name}: ${header.title}.` : "";
  filterRows();
}

/** The order of two rows. NaN comes last, and equal rows keep their order. */
function compareRows(a, b, column, descending) {
  const x = sortValue(a, column);
  const y = sortValue(b, column);
  if (Number.isNaN(x) || Number.isNaN(y)) {
    return Number.isNaN(x) - Number.isNaN(y) || a - b;
  }
  return (descending ? y - x : x - y) || a - b;
}

function sortValue(row, column) {
  if (column === "head") {
    return row;
  }
  if (column === "label") {
    return page.labelOrder.indexOf(page.labels[row]);
  }
  return numberAt(column, row);
}

/** Lists the rows with the chosen labels and the words of the search. */
function filterRows() {
  const boxes = [...$("filters").querySelectorAll("[name=label]:checked")];
  const labels = boxes.map(({ value }) => value);
  const words = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  listedRows = sortedRows.filter(
    (row) => labels.includes(page.labels[row]) && words.every((word) => matches(row, word)),
  );
  list.scrollTop = 0;
  showList(false);
  $("count").textContent = `${listedRows.length} of ${rowTexts.length} heads`;
}

/** Whether a row has this word: "l3", "h5", "l3h5" or the beginning of a label. */
function matches(row, word) {
  const [layer, head] = places[row];
  const texts = [`l${layer}`, `h${head}`, page.labels[row]];
  if (/^[lh]\d+$/.test(word)) {
    return texts.includes(word);
  }
  return texts.some((text) => text.startsWith(word)) || `l${layer}h${head}` === word;
}

/** Saves the table as heads.csv. */
function saveTable() {
  const columns = Object.keys(page.columns);
  const rows = [["layer", "head", "label", ...columns]];
  places.forEach(([layer, head], row) => {
    const numbers = columns.map((name) => Number(numberAt(name, row).toPrecision(7)));
    rows.push([layer, head, page.labels[row], ...numbers]);
  });
  save("heads.csv", csv(rows), "text/csv");
}

table.tHead.addEventListener("click", ({ target }) => {
  const button = target.closest("button");
  if (button) {
    sortBy(button.dataset.sort, button.closest("th"));
  }
});
body.addEventListener("click", (event) => {
  const element = event.target.closest("[data-row]");
  if (element) {
    event.preventDefault();
    choose(...places[Number(element.dataset.row)]);
  }
});
list.addEventListener("keydown", (event) => {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const next = listedRows[listedRows.indexOf(rowOf(state.layer, state.head)) + step];
  if (step && next !== undefined) {
    event.preventDefault();
    choose(...places[next]);
  }
});
list.addEventListener("scroll", () => showList(false));
addEventListener("resize", () => showList(false));
$("filters").addEventListener("input", filterRows);
$("filters").addEventListener("submit", (event) => event.preventDefault());
$("save-table").addEventListener("click", saveTable);
filterRows();
