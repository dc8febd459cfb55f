// The excerpt as text. The shade of each token shows how much attention it gets.
let tokenButtons = [];
let listedExcerpt = null;

/** Lists the tokens of the excerpt as buttons and in menus. */
function listTokens() {
  if (listedExcerpt === state.excerpt) {
    return;
  }
  listedExcerpt = state.excerpt;
  $("pick-excerpt").value = state.excerpt;
  tokenButtons = tokensOf().map(tokenButton);
  $("tokens").replaceChildren(...tokenButtons);
  $("pair-query").replaceChildren(...tokenOptions());
  $("pair-key").replaceChildren(...tokenOptions());
  $("pair-against").replaceChildren(option("", "all other keys"), ...tokenOptions());
}

function tokenOptions() {
  return tokensOf().map((token, position) => option(position, `${position}: ${token}`));
}

function tokenButton(token, position) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = token;
  button.tabIndex = -1;
  button.addEventListener("click", () => choosePair(position, null));
  button.addEventListener("keydown", ({ key }) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[key];
    const next = tokenButtons[position + (step ?? NaN)];
    next?.focus();
    next?.click();
  });
  return button;
}

/** Shades the tokens by the attention of the query, and lists the largest shares. */
function showText() {
  const { query, layer, head } = state;
  const weights = shownWeights(layer, head)[query];
  const color = page.colors[page.labels[rowOf(layer, head)]];
  tokenButtons.forEach((button, position) => {
    const shade = Math.round(70 * Math.sqrt(weights[position] || 0));
    button.style.background = `color-mix(in srgb, ${color} ${shade}%, transparent)`;
    button.classList.toggle("ahead", position > query);
    button.setAttribute("aria-pressed", position === query);
    button.tabIndex = position === query ? 0 : -1;
  });
  $("looks").replaceChildren(...lookWords(query, weights));
  $("looks-pinned").replaceChildren(...pinnedLookWords(query));
}

/** The keys with most attention in the pinned head, for the same query. */
function pinnedLookWords(query) {
  if (!state.pin) {
    return [];
  }
  const [layer, head] = state.pin;
  return [`${headName(layer, head)}: `, ...lookWords(query, shownWeights(layer, head)[query])];
}

const NAMED_KEYS = 4;
const LEAST_SHARE = 0.005;

/** Lists the keys with most attention of a query. */
function lookWords(query, weights) {
  const keys = [...weights.keys()].filter((key) => weights[key] >= LEAST_SHARE);
  keys.sort((a, b) => weights[b] - weights[a]);
  const parts = keys.slice(0, NAMED_KEYS).flatMap((key, number) => {
    const share = `${Math.round(100 * weights[key])}%`;
    return [number ? ", " : "", code(key), ` ${share} (${placeWords(query, key)})`];
  });
  const words = parts.length ? parts : ["no key in particular"];
  return [code(query), " attends to ", ...words, "."];
}

function placeWords(query, key) {
  if (key === query) {
    return "itself";
  }
  return key === 0 ? "first" : `${query - key} back`;
}

/** The first tokens of an excerpt, for the menu. */
function excerptWords(tokens) {
  return `${tokens.slice(0, 6).join("").replaceAll("␣", " ")}…`;
}

$("pick-excerpt").replaceChildren(
  ...page.excerpts.map(({ tokens }, i) => option(i, `${i + 1}: ${excerptWords(tokens)}`)),
);
$("pick-excerpt").addEventListener("change", ({ target }) => chooseExcerpt(Number(target.value)));
