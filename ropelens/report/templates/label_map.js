// A map of layers and heads. Each cell has the label of a head in the baseline and in the chosen
// run or model, and opens both heads. A page may give numbers of heads to show, as `notes`.
const mapEntry = $("map-entry");

/** The entry with which an entry is compared. */
function baselineOf(entry) {
  return page.map.partners[entry];
}

function labelsAt(entry, layer, head) {
  return page.heads.labels[entry]?.[layer]?.[head] ?? "";
}

function listEntries() {
  const options = [];
  page.map.partners.forEach((partner, entry) => {
    if (partner !== entry) {
      options.push(option(entry, page.map.names[entry]));
    }
  });
  mapEntry.replaceChildren(...options);
}

/** One of the two labels of a cell. */
function labelHalf(label) {
  const half = document.createElement("span");
  const look = page.map.looks[label];
  half.className = "label-half";
  half.textContent = look?.sign ?? "";
  half.style.background = look?.color ?? "none";
  return half;
}

/** The cell of a head: a link to the two heads below, or nothing if no entry has the head. */
function mapCell(entry, layer, head) {
  const cell = document.createElement("td");
  const partner = baselineOf(entry);
  const before = labelsAt(partner, layer, head);
  const after = labelsAt(entry, layer, head);
  if (!before && !after) {
    return cell;
  }
  const link = document.createElement("a");
  link.href = `#heads=${partner}.L${layer}H${head},${entry}.L${layer}H${head}`;
  const words = [
    `L${layer} H${head}`,
    `${page.map.names[partner]}: ${before || "no such head"}`,
    `${page.map.names[entry]}: ${after || "no such head"}`,
  ];
  const note = page.map.notes?.[entry]?.[layer]?.[head];
  if (note) {
    words.push(note);
  }
  link.title = words.join("\n");
  link.setAttribute("aria-label", words.join("; "));
  link.classList.toggle("differs", before !== after);
  link.append(labelHalf(before), labelHalf(after));
  cell.append(link);
  return cell;
}

function headerCell(text, scope) {
  const header = document.createElement("th");
  header.scope = scope;
  header.textContent = text;
  return header;
}

function showMap() {
  const entry = Number(mapEntry.value);
  const layers = page.heads.labels[entry].length;
  const heads = page.heads.labels[entry][0].length;
  const top = document.createElement("tr");
  top.append(headerCell("layer", "col"));
  for (let head = 0; head < heads; head++) {
    top.append(headerCell(`H${head}`, "col"));
  }
  const rows = [];
  for (let layer = 0; layer < layers; layer++) {
    const row = document.createElement("tr");
    row.append(headerCell(`L${layer}`, "row"));
    for (let head = 0; head < heads; head++) {
      row.append(mapCell(entry, layer, head));
    }
    rows.push(row);
  }
  const header = document.createElement("thead");
  header.append(top);
  const body = document.createElement("tbody");
  body.append(...rows);
  $("label-map").replaceChildren(header, body);
  $("label-map").classList.toggle("dense", heads > page.map.mostWithSigns);
  showCounts(entry);
  showPage($("map-page"), entry);
  showPage($("map-baseline-page"), baselineOf(entry));
}

function showCounts(entry) {
  const cells = document.querySelectorAll("#label-map a");
  const changed = document.querySelectorAll("#label-map a.differs").length;
  const partner = page.map.names[baselineOf(entry)];
  $("map-counts").textContent =
    `${changed} of ${cells.length} heads have another label in ${page.map.names[entry]} ` +
    `(right) than in ${partner} (left).`;
}

/** Shows a link to the page of an entry, if it has a page. */
function showPage(link, entry) {
  link.hidden = !page.map.pages[entry];
  link.href = page.map.pages[entry];
  link.textContent = `page of ${page.map.names[entry]}`;
}

mapEntry.addEventListener("change", showMap);
$("label-map").addEventListener("click", ({ target }) => {
  if (target.closest("a")) {
    $("heads-title").scrollIntoView();
  }
});
listEntries();
if (mapEntry.options.length) {
  showMap();
}
