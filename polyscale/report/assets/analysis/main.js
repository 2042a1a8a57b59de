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
  const { forms = [], scores = [] } = part("kernel");
  const { parts = [], maps = [] } = part("symmetry");
  const { rows = [], tail = [], decay = [] } = part("error");
  return [
    data.attention,
    weights,
    forms,
    scores,
    parts,
    maps,
    rows,
    tail.map(({ layer, head }) => ({ layer, head })),
    decay,
    part("normality").levels,
    part("hsa").layers,
  ].flatMap((list) => list ?? []);
}

// Three linked lists: the heads offered are those of the layer, the levels those of the head.
function chooser(place, list, chosen, prefix = "") {
  const order = (a, b) => (isNumber(a) && isNumber(b) ? a - b : isNumber(a) ? 1 : -1);
  const keys = ["layer", "head", "level"];
  const all = Object.fromEntries(
    keys.map((key) => [key, list.some((entry) => entry[key] !== undefined && entry[key] !== null)]),
  );
  const selects = keys
    .filter((key) => all[key])
    .map((key) => {
      const select = html("select", {
        "aria-label": `${prefix}${key}`,
        change: () => {
          chosen[key] = isNumber(Number(select.value)) ? Number(select.value) : select.value;
          refresh();
        },
      });
      place.append(html("label", {}, `${prefix}${key}`, select));
      return [key, select];
    });
  const update = () => {
    const before = {};
    for (const [key, select] of selects) {
      const offered = unique(
        list
          .filter((entry) => matches(entry, { ...entry, ...before }, Object.keys(before)))
          .map((entry) => entry[key]),
      )
        .filter((value) => value !== undefined && value !== null)
        .sort(order);
      if (!offered.includes(chosen[key])) chosen[key] = offered[0];
      if (key !== "level") before[key] = chosen[key];
      select.replaceChildren(
        ...offered.map((value) =>
          html(
            "option",
            { value, selected: value === chosen[key] },
            NAMES[key](value).replace(`${key} `, ""),
          ),
        ),
      );
      select.disabled = offered.length < 2;
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
  unique(
    entries()
      .map((entry) => entry.level)
      .filter((level) => level !== null && level !== undefined),
  ).length > 1;
bar.hidden = bar.querySelectorAll("select:enabled").length === 0;
bar.append(
  html("p", { class: "hint" }, "Chosen for the whole page. In a figure: hover, or Tab and arrow keys."),
);
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
    // one broken section must not take the others with it
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
