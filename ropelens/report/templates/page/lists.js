// The heads as a list, of which only the rows in sight exist, and as a table.
const ROW = 30;
let listed = [];

function sortList() {
  const column = $("list-by").value;
  const value = (row) => column === "" ? -row : number(column, row);
  listed = places.map((_, row) => row).sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y) || a - b;
    return y - x || a - b;
  });
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
  const rows = places.map(([layer, head], row) => [layer, head, page.labels[row], ...columns.map((name) => number(name, row))]);
  save("heads.csv", csv([["layer", "head", "label", ...columns], ...rows]), "text/csv");
});

// ---- the table

const table = $("table");
const body = table.tBodies[0];
const tableRows = [...body.rows];

function markRow(row) {
  body.querySelector("[aria-current]")?.removeAttribute("aria-current");
  tableRows[row].setAttribute("aria-current", "true");
}

/** Numbers the largest first, names in order; a second time the other way round. */
function sortBy(key, header) {
  const named = key === "head" || key === "label", now = header.getAttribute("aria-sort");
  const down = named ? now === "ascending" : now !== "descending";
  const value = (row) => key === "head" ? row : key === "label"
    ? page.labelOrder.indexOf(page.labels[row]) : number(key, row);
  const order = tableRows.map((_, row) => row).sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y) || a - b;
    return (down ? y - x : x - y) || a - b;
  });
  table.querySelectorAll("th[aria-sort]").forEach((th) => th.removeAttribute("aria-sort"));
  header.setAttribute("aria-sort", down ? "descending" : "ascending");
  body.append(...order.map((row) => tableRows[row]));
}

function filter() {
  const shown = new Set([...$("filters").querySelectorAll("[name=label]:checked")].map((box) => box.value));
  const words = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const row of tableRows) {
    const text = `${row.cells[0].textContent} ${row.dataset.label}`.toLowerCase().split(" ");
    const found = words.every((word) => /^[lh]\d+$/.test(word) ? text.includes(word)
      : text.some((part) => part.startsWith(word)) || text.slice(0, 2).join("") === word);
    row.hidden = !(shown.has(row.dataset.label) && found);
    count += !row.hidden;
  }
  $("count").textContent = `${count} of ${tableRows.length} heads`;
}

table.tHead.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  const header = button.closest("th");
  sortBy(button.dataset.sort, header);
  $("column-words").textContent = header.title ? `${header.innerText.replace(/\s+/g, " ")}: ${header.title}.` : "";
});
body.addEventListener("click", (event) => {
  const row = event.target.closest("tr");
  if (!row) return;
  event.preventDefault();
  choose(...places[Number(row.dataset.row)]);
});
body.addEventListener("keydown", (event) => {
  if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
  const next = event.key === "ArrowDown" ? "nextElementSibling" : "previousElementSibling";
  let row = event.target.closest("tr")[next];
  while (row?.hidden) row = row[next];
  if (!row) return;
  event.preventDefault();
  row.querySelector("a").focus();
});
$("filters").addEventListener("input", filter);
$("filters").addEventListener("submit", (event) => event.preventDefault());
