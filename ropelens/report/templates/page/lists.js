// The table of heads. Only the visible rows and one screen of other rows are in the document.
const ROW = 30;  // height in pixels, as in page.css

const whole = $("whole-table"), list = $("list");
// Each row is a line of text, which is parsed at its first use, because a thousand rows take long.
const lines = whole.textContent.split(/^(?=<tr data-row)/m);
const table = new DOMParser().parseFromString(lines.shift(), "text/html").querySelector("table");
const body = table.tBodies[0];
const made = new Map();
function rowAt(row) {
  if (!made.has(row)) {
    const template = document.createElement("template");
    template.innerHTML = lines[row];
    made.set(row, template.content.querySelector("tr"));
  }
  return made.get(row);
}
list.append(table);

/** Empty rows for the space above and below. */
const gaps = [0, 1].map(() => Object.assign(document.createElement("tr"), { className: "gap", ariaHidden: "true",
  innerHTML: `<td colspan="${rowAt(0).cells.length}">` }));
body.append(...gaps);
table.tHead.rows[0].setAttribute("aria-rowindex", 1);

let order = lines.map((_, row) => row), shown = order, current = rowAt(0);

/** Shows the visible rows, or all rows for print. `follow` scrolls to the chosen row. */
function showList(follow) {
  if (!seen(list)) return;
  const height = list.clientHeight - table.tHead.offsetHeight, top = ROW * shown.indexOf(rowOf(state.layer, state.head));
  if (follow && (top < list.scrollTop || top + ROW > list.scrollTop + height)) list.scrollTop = top - height / 2;
  const screen = Math.ceil(height / ROW), first = Math.floor(list.scrollTop / ROW), focused = document.activeElement;
  const begin = printing ? 0 : Math.max(0, first - screen), end = printing ? shown.length : Math.min(shown.length, first + 2 * screen);
  const rows = shown.slice(begin, end);
  gaps[0].cells[0].style.height = `${begin * ROW}px`;
  gaps[1].cells[0].style.height = `${(shown.length - end) * ROW}px`;
  for (const tr of [...body.rows].filter((tr) => tr.dataset.row && !rows.includes(Number(tr.dataset.row)))) tr.remove();
  rows.forEach((row, i) => {  // a click may have begun on a row, so do not move rows that stay
    const tr = rowAt(row), before = i ? rowAt(rows[i - 1]) : gaps[0];
    if (before.nextSibling !== tr) before.after(tr);
    tr.setAttribute("aria-rowindex", begin + i + 2);
  });
  table.setAttribute("aria-rowcount", shown.length + 1);
  if (list.contains(focused) || !focused.isConnected) (focused.isConnected ? focused : list).focus({ preventScroll: true });
}

function markRow(row) {
  current.removeAttribute("aria-current");
  current = rowAt(row);
  current.setAttribute("aria-current", "true");
}

/** Sorts numbers from the largest and names from the first; a second click reverses. NaN comes last. */
function sortBy(key, header) {
  const named = key === "head" || key === "label", now = header.getAttribute("aria-sort");
  const down = named ? now === "ascending" : now !== "descending";
  const value = (row) => key === "head" ? row : key === "label" ? page.labelOrder.indexOf(page.labels[row]) : number(key, row);
  order = lines.map((_, row) => row).sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y) || a - b;
    return (down ? y - x : x - y) || a - b;
  });
  table.querySelectorAll("th[aria-sort]").forEach((th) => th.removeAttribute("aria-sort"));
  header.setAttribute("aria-sort", down ? "descending" : "ascending");
  $("column-words").textContent = header.title ? `${header.innerText.replace(/\s+/g, " ")}: ${header.title}.` : "";
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
  list.scrollTop = 0;
  showList(false);
  $("count").textContent = `${shown.length} of ${lines.length} heads`;
}

table.tHead.addEventListener("click", ({ target }) => {
  const button = target.closest("button");
  if (button) sortBy(button.dataset.sort, button.closest("th"));
});
body.addEventListener("click", (event) => {
  const row = event.target.closest("[data-row]");
  if (!row) return;
  event.preventDefault();
  choose(...places[Number(row.dataset.row)]);
});
list.addEventListener("keydown", (event) => {
  const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const next = shown[shown.indexOf(rowOf(state.layer, state.head)) + by];
  if (!by || next === undefined) return;
  event.preventDefault();
  choose(...places[next]);
});
list.addEventListener("scroll", () => showList(false));
addEventListener("resize", () => showList(false));
$("filters").addEventListener("input", filter);
$("filters").addEventListener("submit", (event) => event.preventDefault());
$("save-table").addEventListener("click", () => {
  const columns = Object.keys(page.columns);
  const rows = places.map(([layer, head], row) => [layer, head, page.labels[row], ...columns.map((name) => Number(number(name, row).toPrecision(7)))]);
  save("heads.csv", csv([["layer", "head", "label", ...columns], ...rows]), "text/csv");
});
filter();
