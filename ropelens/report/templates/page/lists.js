// The heads as a list and as a table; of both only the rows in sight, and some more, are in the document.
const ROW = 30;
let listed = [];

/** All rows by a value of each: those that have none come last, equal ones as the table has them. */
const ranked = (value, down = true) => places.map((_, row) => row).sort((a, b) => {
  const [x, y] = [value(a), value(b)];
  if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y) || a - b;
  return (down ? y - x : x - y) || a - b;
});

function sortList() {
  const column = $("list-by").value;
  const value = (row) => column === "" ? -row : number(column, row);
  listed = ranked(value);
  $("list-all").style.height = `${ROW * listed.length}px`;
  showList(true);
}

/** The rows in sight; `follow` brings the chosen one there. */
function showList(follow) {
  const box = $("list");
  if (!seen(box)) return;
  const chosen = listed.indexOf(rowOf(state.layer, state.head));
  const top = ROW * chosen;
  if (follow && (top < box.scrollTop || top + ROW > box.scrollTop + box.clientHeight)) box.scrollTop = top - box.clientHeight / 2;
  const first = Math.max(0, Math.floor(box.scrollTop / ROW) - 4);
  const many = Math.ceil(box.clientHeight / ROW) + 8;
  const column = $("list-by").value;
  $("list-all").replaceChildren(...listed.slice(first, first + many).map((row, i) => {
    const [layer, head] = places[row], label = page.labels[row];
    const line = Object.assign(document.createElement("div"), { id: `list-${row}`, className: "line" });
    line.setAttribute("role", "option");
    line.setAttribute("aria-selected", first + i === chosen);
    line.setAttribute("aria-setsize", listed.length);
    line.setAttribute("aria-posinset", first + i + 1);
    line.style.top = `${ROW * (first + i)}px`;
    line.dataset.row = row;
    const glyph = Object.assign(document.createElement("span"), { className: "glyph", textContent: page.glyphs[label] });
    glyph.style.color = `var(--${label})`;
    const name = Object.assign(document.createElement("b"), { textContent: `L${layer} H${head}` });
    const bits = Object.assign(document.createElement("span"), { className: "value",
      textContent: column && column !== "total_bits" ? `${number(column, row).toPrecision(3)}, ${number("total_bits", row).toFixed(2)} bits` : `${number("total_bits", row).toFixed(2)} bits` });
    line.append(glyph, name, ` ${label}`, bits);
    return line;
  }));
  if (chosen >= 0) box.setAttribute("aria-activedescendant", `list-${rowOf(state.layer, state.head)}`);
}

$("list").addEventListener("scroll", () => showList(false));
$("list").addEventListener("click", (event) => {
  const line = event.target.closest("[data-row]");
  if (line) choose(...places[Number(line.dataset.row)]);
});
$("list").addEventListener("keydown", (event) => {
  const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const next = listed[listed.indexOf(rowOf(state.layer, state.head)) + by];
  if (!by || next === undefined) return;
  event.preventDefault();
  choose(...places[next]);
});
$("list-by").addEventListener("change", sortList);
$("save-table").addEventListener("click", () => {
  const columns = Object.keys(page.columns);
  const rows = places.map(([layer, head], row) => [layer, head, page.labels[row], ...columns.map((name) => Number(number(name, row).toPrecision(7)))]);
  save("heads.csv", csv([["layer", "head", "label", ...columns], ...rows]), "text/csv");
});

// ---- the table

// Each row is a line of the text: made when it is first asked for, for a thousand take long.
const whole = $("whole-table"), scroll = whole.parentElement;
const lines = whole.textContent.split(/^(?=<tr data-row)/m);
const table = new DOMParser().parseFromString(lines.shift(), "text/html").querySelector("table");
const body = table.createTBody();
const made = new Map();
function rowAt(row) {
  if (!made.has(row)) {
    const template = document.createElement("template");
    template.innerHTML = lines[row];
    made.set(row, template.content.querySelector("tr"));
  }
  return made.get(row);
}
let order = lines.map((_, row) => row), shown = order, current = rowAt(0), rowHeight = 29;

/** Room for the rows above or below those that are there. */
const gaps = [0, 1].map(() => {
  const gap = document.createElement("tr");
  gap.className = "gap";
  gap.setAttribute("aria-hidden", "true");
  gap.insertCell().colSpan = current.cells.length;
  return gap;
});
body.replaceChildren(...gaps);
table.tHead.rows[0].setAttribute("aria-rowindex", 1);

/** A row that nobody sees, of the longest text of every column: columns stay as wide as they are. */
const widest = table.createTFoot();
widest.setAttribute("aria-hidden", "true");
const longest = [];
lines.forEach((line, row) => line.split(/<\/t[hd]>/).forEach((cell, column) => {
  const { length } = cell.replace(/<[^>]*>/g, "");
  if (length > (longest[column]?.length ?? -1)) longest[column] = { row, length };
}));
const cells = widest.insertRow();
for (let column = 0; column < current.cells.length; column++) {
  const cell = rowAt(longest[column].row).cells[column].cloneNode(true);
  cell.querySelector("a")?.replaceWith(cell.textContent);
  cells.append(cell);
}
whole.replaceWith(table);

/** Put the rows in sight there, and a screen of them before and after, or all of them. */
function showRows(all = matchMedia("print").matches) {
  const screen = Math.ceil(innerHeight / rowHeight), top = Math.floor(scroll.scrollTop / rowHeight);
  const begin = all ? 0 : Math.max(0, Math.min(top, shown.length) - screen), end = all ? shown.length : top + 2 * screen;
  const inside = shown.slice(begin, end).map(rowAt), kept = new Set([...inside, ...gaps]);
  const focused = document.activeElement;
  for (const row of [...body.rows]) if (!kept.has(row)) row.remove();
  gaps[0].cells[0].style.height = `${begin * rowHeight}px`;
  gaps[1].cells[0].style.height = `${Math.max(0, shown.length - end) * rowHeight}px`;
  inside.reduce((before, row, i) => {
    row.setAttribute("aria-rowindex", begin + i + 2);
    if (before.nextSibling !== row) before.after(row);
    return row;
  }, gaps[0]);
  table.setAttribute("aria-rowcount", shown.length + 1);
  if (!focused.isConnected) scroll.focus({ preventScroll: true });
  const height = inside[0]?.getBoundingClientRect().height || rowHeight;
  if (Math.abs(height - rowHeight) < 0.05) return;
  rowHeight = height;
  showRows(all);
}

function markRow(row) {
  current.removeAttribute("aria-current");
  current = rowAt(row);
  current.setAttribute("aria-current", "true");
}

/** Numbers the largest first, names in order; a second time the other way round. */
function sortBy(key, header) {
  const named = key === "head" || key === "label", now = header.getAttribute("aria-sort");
  const down = named ? now === "ascending" : now !== "descending";
  const value = (row) => key === "head" ? row : key === "label"
    ? page.labelOrder.indexOf(page.labels[row]) : number(key, row);
  order = ranked(value, down);
  table.querySelectorAll("th[aria-sort]").forEach((th) => th.removeAttribute("aria-sort"));
  header.setAttribute("aria-sort", down ? "descending" : "ascending");
  filter();
}

function filter() {
  const labels = new Set([...$("filters").querySelectorAll("[name=label]:checked")].map((box) => box.value));
  const words = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  shown = order.filter((row) => {
    const [layer, head] = places[row], label = page.labels[row];
    const text = [`l${layer}`, `h${head}`, label];
    return labels.has(label) && words.every((word) => /^[lh]\d+$/.test(word) ? text.includes(word)
      : text.some((part) => part.startsWith(word)) || `l${layer}h${head}` === word);
  });
  scroll.scrollTop = 0;
  showRows();
  $("count").textContent = `${shown.length} of ${lines.length} heads`;
}

table.tHead.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  const header = button.closest("th");
  sortBy(button.dataset.sort, header);
  $("column-words").textContent = header.title ? `${header.innerText.replace(/\s+/g, " ")}: ${header.title}.` : "";
});
body.addEventListener("click", (event) => {
  const row = event.target.closest("[data-row]");
  if (!row) return;
  event.preventDefault();
  choose(...places[Number(row.dataset.row)]);
});
body.addEventListener("keydown", (event) => {
  if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
  const at = shown.indexOf(Number(event.target.closest("tr").dataset.row)) + (event.key === "ArrowDown" ? 1 : -1);
  if (shown[at] === undefined) return;
  const row = rowAt(shown[at]);
  event.preventDefault();
  if (!row.isConnected) {
    scroll.scrollTop = rowHeight * at;
    showRows();
  }
  row.querySelector("a").focus();
});
scroll.addEventListener("scroll", () => showRows());
addEventListener("resize", () => showRows());
addEventListener("beforeprint", () => showRows(true));
addEventListener("afterprint", () => showRows());
$("filters").addEventListener("input", filter);
$("filters").addEventListener("submit", (event) => event.preventDefault());
filter();
