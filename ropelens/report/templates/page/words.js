// Describes the chosen head: its label, its bits, and what it follows.
function labelWords(row) {
  const offset = numberAt("offset", row);
  const low = numberAt("offset_low", row);
  const high = numberAt("offset_high", row);
  const words = [page.labels[row]];
  if (!Number.isNaN(offset)) {
    words.push(`offset ${offset}`);
  } else if (!Number.isNaN(low)) {
    words.push(`offsets ${low} to ${high}`);
  }
  const doubts = ["uncertain", "opposed"].filter((doubt) => page.doubts[doubt].includes(row));
  return [...words, ...doubts].join(", ");
}

const BIT_PARTS = ["sink", "position", "shared", "content", "both"];

function bitsWords(row) {
  const shares = bitShares(row);
  const words = [];
  BIT_PARTS.forEach((name, i) => {
    if (name !== "shared" || !Number.isNaN(shares[i])) {
      words.push(`${name} ${Math.round(100 * (shares[i] || 0))}%`);
    }
  });
  return `${numberAt("total_bits", row).toFixed(2)} bits: ${words.join(", ")}`;
}

const WITHOUT_CHOICE = ["sink", "diffuse", "untested"];

/** What the head follows when keys exchange contents; "" if this was not measured. */
function followWords(row) {
  if (!page.columns.follows_chance || WITHOUT_CHOICE.includes(page.labels[row])) {
    return "";
  }
  const percentOf = (name) => `${Math.round(100 * numberAt(name, row))}%`;
  if (!(numberAt("follows_position", row) >= 0)) {
    return "";
  }
  return (
    ` When keys exchange contents, ${percentOf("follows_position")} of its attention on them ` +
    `stays at the same positions and ${percentOf("follows_content")} moves with the contents ` +
    `(chance ${percentOf("follows_chance")}).`
  );
}

/** The attribution of a head, on the page of a prompt. */
function effectWords(row) {
  const effect = nats(numberAt("attribution", row), (size) => size.toFixed(3));
  const previous = Math.round(100 * numberAt("previous_token", row));
  const sinks = Math.round(100 * numberAt("sink_mass", row));
  return (
    `Attribution ${effect}. ` + `Attention on the previous token ${previous}%, on sinks ${sinks}%.`
  );
}

/** Describes the chosen head next to its figures. */
function describeHead() {
  const { layer, head } = state;
  const row = rowOf(layer, head);
  const { cells } = rowAt(row);
  $("pick-layer").value = layer;
  $("pick-head").value = head;
  const title = [`Layer ${layer}, head ${head}`];
  if (!page.prompt) {
    title.push(": ", cells[1].querySelector(".glyph").cloneNode(true), labelWords(row));
  }
  $("head-title").replaceChildren(...title);
  $("now").textContent = page.prompt ? effectWords(row) : `${bitsWords(row)}.${followWords(row)}`;
  showBudget(row);
  for (const element of document.querySelectorAll("#head .plot")) {
    element.dataset.words ??= element.getAttribute("aria-label");
    const label = `${element.dataset.words}: layer ${layer}, head ${head}`;
    element.setAttribute("aria-label", label);
  }
  for (const cell of document.querySelectorAll("#numbers [data-column]")) {
    // The first two cells are the head and its label.
    cell.textContent = cells[Number(cell.dataset.column) + 2].textContent;
  }
}

/** Shows the shares of the bits as a bar. */
function showBudget(row) {
  const shares = bitShares(row);
  $("budget")
    .querySelectorAll("span")
    .forEach((bar, i) => {
      bar.style.flexGrow = shares[i] || 0;
      bar.hidden = !(shares[i] >= 0.005);
    });
}
