// The table of heads whose label changed shows two chosen variants, next to the control.
const variantMenus = [$("variant-0"), $("variant-1")].filter(Boolean);

function showVariants() {
  const chosen = variantMenus.map((menu) => menu.value);
  for (const cell of document.querySelectorAll("#changed [data-variant]")) {
    cell.hidden = !chosen.includes(cell.dataset.variant);
  }
  for (const row of document.querySelectorAll("#changed tbody tr")) {
    row.hidden = !row.querySelector("[data-changed]:not([hidden])");
  }
}

if (variantMenus.length) {
  variantMenus.forEach((menu) => menu.addEventListener("change", showVariants));
  showVariants();
}
for (const link of document.querySelectorAll(".head-map a")) {
  link.title = link.getAttribute("aria-label");
}
for (const link of document.querySelectorAll('a[href^="#heads="]')) {
  link.addEventListener("click", () => $("heads-title").scrollIntoView());
}
