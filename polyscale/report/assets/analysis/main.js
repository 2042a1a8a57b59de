// What is chosen, and who redraws when it changes.

const data = JSON.parse(document.getElementById("analysis").textContent);
const watchers = [];
const listen = (redraw) => {
  watchers.push(redraw);
};
function refresh() {
  hideTip();
  for (const redraw of watchers) redraw();
}

const layerName = (layer) => (isNumber(layer) ? `layer ${layer}` : "all layers");
const headName = (head) => (isNumber(head) ? `head ${head}` : "all heads");
const levelName = (level) => (isNumber(level) ? `level ${level}` : (level ?? "all levels"));
const NAMES = { layer: layerName, head: headName, level: levelName };

// Every entry of the analysis that belongs to a layer, a head or a level.
function entries() {
  const weights = (part("levels").weights ?? []).flatMap((heads, layer) =>
    heads.flatMap((levels, head) => levels.map((_, level) => ({ layer, head, level }))),
  );
  const { rows = [], tail = [], decay = [] } = part("error");
  const ofHeads = tail.map(({ layer, head }) => ({ layer, head }));
  const lists = [part("kernel").forms, part("kernel").scores, part("symmetry").parts, part("symmetry").maps];
  const others = [data.attention, part("normality").levels, part("hsa").layers];
  return [...lists, ...others, weights, rows, ofHeads, decay].flatMap((list) => list ?? []);
}

// Three linked lists: the heads offered are those of the layer, the levels those of the head.
function chooser(place, list, chosen, prefix = "") {
  const order = (a, b) => (isNumber(a) && isNumber(b) ? a - b : isNumber(a) ? 1 : -1);
  const known = (value) => value !== undefined && value !== null;
  const selects = PLACE.filter((key) => list.some((entry) => known(entry[key]))).map((key) => {
    const change = ({ target: { value } }) => {
      chosen[key] = isNumber(Number(value)) ? Number(value) : value;
      refresh();
    };
    const control = html("select", { "aria-label": `${prefix}${key}`, change });
    place.append(labelled(`${prefix}${key}`, control));
    return [key, control];
  });
  const update = () => {
    const before = {};
    for (const [key, control] of selects) {
      const here = list.filter((entry) => matches(entry, { ...entry, ...before }, Object.keys(before)));
      const offered = unique(here.map((entry) => entry[key]))
        .filter(known)
        .sort(order);
      if (!offered.includes(chosen[key])) chosen[key] = offered[0];
      if (key !== "level") before[key] = chosen[key];
      const option = (value) =>
        html("option", { value, selected: value === chosen[key] }, NAMES[key](value).replace(`${key} `, ""));
      control.replaceChildren(...offered.map(option));
      control.disabled = offered.length < 2;
    }
  };
  update();
  listen(update);
}

const bar = document.getElementById("choices");
const choice = { layer: null, head: null, level: null };
const start = data.attention?.find((entry) => entry.level === "merged") ?? data.attention?.[0] ?? {};
Object.assign(choice, { layer: start.layer, head: start.head, level: start.level });
chooser(bar, entries(), choice);
manyLevels =
  unique(entries().map((entry) => entry.level ?? null)).filter((level) => level !== null).length > 1;
bar.hidden = bar.querySelectorAll("select:enabled").length === 0;
const hint = "Chosen for the whole page. In a figure: hover, or Tab and arrow keys.";
bar.append(html("p", { class: "hint" }, hint));
listen(() => {
  for (const line of document.querySelectorAll(".shown")) line.textContent = `Shown: ${whose(choice)}.`;
});

document.addEventListener("click", (event) => {
  const mark = event.target.closest?.("[data-pick]");
  if (!mark || mark.dataset.pick === "{}") return;
  Object.assign(choice, JSON.parse(mark.dataset.pick));
  refresh();
});

const SECTIONS = {
  attention: attentionSection,
  levels: levelsSection,
  kernel: kernelSection,
  symmetry: symmetrySection,
  error: errorSection,
  normality: normalitySection,
  cost: costSection,
  hsa: treeSection,
};
for (const [name, build] of Object.entries(SECTIONS)) {
  const place = document.querySelector(`#${name} > .place`);
  if (!place) continue;
  try {
    build(place);
  } catch (error) {
    // one broken section must not break the others
    place.append(html("p", { class: "note" }, `This section could not be drawn: ${error.message}`));
    console.error(error);
  }
}

// Light or dark: as the system says, until the reader says otherwise; paper is always light.
const dark = document.getElementById("dark");
const system = window.matchMedia("(prefers-color-scheme: dark)");
const theme = document.getElementById("theme");
let isDark = system.matches;
function setTheme(wanted) {
  isDark = wanted;
  dark.media = wanted ? "screen" : "not all";
  colours.clear();
  theme.textContent = wanted ? "Light" : "Dark";
  refresh();
}
theme.addEventListener("click", () => setTheme(!isDark));
system.addEventListener("change", (event) => setTheme(event.matches));
let before = isDark;
window.addEventListener("beforeprint", () => {
  before = isDark;
  setTheme(false);
});
window.addEventListener("afterprint", () => setTheme(before));
document
  .getElementById("save-json")
  .addEventListener("click", () => download(JSON.stringify(data), "application/json", "report.json"));
setTheme(isDark);
