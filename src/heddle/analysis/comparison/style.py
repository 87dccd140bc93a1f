"""The look of report.html: its style sheet, and the script that draws the figures and switches designs."""

# The series are Okabe & Ito's colours (2008) but for yellow, which no white page shows; the baseline is ink.
CSS = """
:root {
  color-scheme: light dark;
  --page: #f7f5f0; --card: #ffffff; --ink: #1d2129; --soft: #59616e; --line: #d9d5cb; --grid: #ebe8e1;
  --tint: #f2efe8; --note: #fdf5e3; --note-line: #d99a1c; --clear: rgba(0, 0, 0, 0);
  --series-0: #2b313b; --series-1: #0072b2; --series-2: #d55e00; --series-3: #009e73;
  --series-4: #cc79a7; --series-5: #e69f00; --series-6: #56b4e9;
}
@media (prefers-color-scheme: dark) {
  :root:not(.paper) {
    --page: #14171c; --card: #1c2027; --ink: #eceae5; --soft: #a6adb8; --line: #39404b; --grid: #2a3039;
    --tint: #242932; --note: #2b2619; --note-line: #c9952f;
    --series-0: #e4e2dc; --series-1: #3a9bdc; --series-2: #f0803c; --series-3: #21bd92;
    --series-4: #dd94bd; --series-5: #f0b429; --series-6: #8fd3ff;
  }
}
* { box-sizing: border-box; }
[hidden] { display: none !important; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 Inter, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums;
}
.threads { display: flex; height: 6px; }
.threads i { flex: 1; }
.wrap { max-width: 1360px; margin: 0 auto; padding: 30px 28px 60px; }
.brand { display: flex; flex-wrap: wrap; align-items: center; gap: 6px 12px; }
.brand { color: var(--soft); font-size: 14.5px; }
.brand strong { color: var(--ink); font-size: 17px; letter-spacing: -0.01em; }
.brand svg { width: 26px; height: 26px; }
.facts { display: flex; flex-wrap: wrap; list-style: none; margin: 0; padding: 0; gap: 2px 0; }
.facts li:not(:last-child)::after { content: "·"; margin: 0 8px; }
h1 {
  font-size: clamp(1.4rem, 2.5vw, 2.1rem); line-height: 1.28; letter-spacing: -0.02em; font-weight: 650;
  margin: 20px 0 10px; max-width: 34em; text-wrap: balance; overflow-wrap: anywhere;
}
h1.long { font-size: clamp(1.1rem, 1.8vw, 1.4rem); max-width: 60em; }
.verdict {
  text-wrap: pretty; font-size: 1.1rem; color: var(--soft); margin: 0 0 6px; max-width: 62em; overflow-wrap: anywhere;
}
.name {
  color: var(--ink); font-weight: 650; text-decoration: underline; text-decoration-thickness: 0.14em;
  text-underline-offset: 0.2em; text-decoration-color: var(--own); text-decoration-skip-ink: none;
}
h2 { font-size: 1.25rem; letter-spacing: -0.01em; margin: 44px 0 12px; }
h3 { font-size: 1rem; margin: 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 14px; }
.warnings {
  background: var(--note); border-left: 4px solid var(--note-line); border-radius: 4px 12px 12px 4px;
  padding: 12px 20px; margin: 20px 0 0; max-width: 62em;
}
.warnings h2 { font-size: 1rem; margin: 0 0 2px; }
.warnings ul { margin: 0; padding-left: 1.1em; overflow-wrap: anywhere; }
.summary { margin: 26px 0 0; overflow: hidden; }
table { border-collapse: collapse; width: 100%; }
.summary th, .summary td { text-align: left; padding: 13px 10px; vertical-align: middle; }
.summary th:first-child { padding-left: 22px; }
.summary :is(td, th):last-child { padding-right: 22px; }
.summary thead th { font-size: 13px; line-height: 1.3; font-weight: 600; vertical-align: bottom; }
.summary thead small { display: block; font-weight: 400; font-size: 12px; }
.summary tbody tr { border-top: 1px solid var(--grid); }
.summary tbody th { font-weight: 400; }
.design-name { width: 18%; }
.loss { width: 11.5%; }
.summary .who { display: flex; gap: 11px; align-items: center; }
.summary .who b { font-weight: 650; overflow-wrap: anywhere; line-height: 1.3; display: block; }
.swatch { width: 34px; height: 16px; flex: none; }
small, .small { color: var(--soft); font-size: 13px; }
.big { font-size: 1.14rem; font-weight: 650; letter-spacing: -0.01em; }
td small { display: block; }
.figure-number, .word, thead .cost, .who small, .name.short { white-space: nowrap; }
.scale { width: 15%; min-width: 130px; }
.summary td.scale { background: linear-gradient(var(--soft), var(--soft)) 50% 0 / 1px 100% no-repeat; }
.ends { display: flex; justify-content: space-between; gap: 1.5em; }
.ends span { flex: 1; }
.ends span:first-child { text-align: right; }
.whisker { display: block; width: 100%; height: 26px; overflow: visible; }
.word { display: inline-block; font-size: 13px; border-radius: 99px; padding: 0 9px; }
.better { background: var(--ink); color: var(--card); }
.worse { box-shadow: inset 0 0 0 1.5px var(--ink); }
.open { box-shadow: inset 0 0 0 1px var(--line); color: var(--soft); }
.bar { display: block; height: 5px; border-radius: 3px; background: var(--tint); margin-top: 5px; }
.bar.blind { position: relative; }
.bar.blind::after {
  content: ""; position: absolute; left: var(--blind); top: -2px; height: 9px; border-left: 2px solid var(--soft);
}
.cost { width: 8.2%; }
.heat td { background: color-mix(in srgb, var(--series-1) var(--heat), transparent); }
.heat { width: auto; min-width: min(100%, 420px); }
.heat :is(td, thead th) { padding-right: 12px; }
.heat .blindly :is(th, td) { color: var(--soft); font-weight: 400; background: none; }
.recall { padding: 18px 22px; }
.recall p { margin: 0 0 10px; max-width: 72em; }
.longer { padding: 18px 22px; min-width: 0; }
.longer dt { margin-top: 6px; }
.longer p { margin: 12px 0 0; overflow-wrap: anywhere; }
.longer .who { display: flex; gap: 11px; align-items: center; }
.longer th small { display: block; font-weight: 400; }
.whole { grid-column: 1 / -1; }
.recall dl { display: grid; gap: 0 26px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr)); }
.experts-meaning { max-width: 72em; }
.experts .loads { width: 45%; min-width: 140px; }
.experts svg { display: block; width: 100%; height: 30px; }
.experts rect { fill: var(--own); }
.experts line { stroke: var(--soft); stroke-dasharray: 4 3; vector-effect: non-scaling-stroke; }
.bar i { display: block; height: 100%; border-radius: 3px; background: var(--own); width: var(--part); }
.legend { display: flex; flex-wrap: wrap; align-items: center; gap: 8px; margin: 0 0 14px; }
.legend small { margin-left: 6px; }
button {
  font: inherit; font-size: 14px; color: var(--ink); background: var(--card); border: 1px solid var(--line);
  border-radius: 99px; padding: 4px 14px 4px 10px; cursor: pointer; text-align: left;
}
.legend button { display: flex; gap: 9px; align-items: center; overflow-wrap: anywhere; }
.legend button[aria-pressed="false"] { opacity: 0.45; text-decoration: line-through; }
button:hover { border-color: var(--soft); }
:focus-visible { outline: 3px solid var(--series-1); outline-offset: 2px; }
.grid, .designs, .lists { display: grid; gap: 18px; }
.grid { grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); }
figure { margin: 0; padding: 18px 20px 14px; min-width: 0; display: flex; flex-direction: column; }
figcaption p { margin: 0 0 8px; }
figcaption div { display: flex; justify-content: space-between; align-items: center; height: 28px; }
figcaption button { font-size: 12.5px; padding: 2px 11px; white-space: nowrap; color: var(--soft); }
.plot { height: 350px; width: 100%; }
.empty { min-height: 120px; display: grid; place-items: center; color: var(--soft); text-align: center; }
details { margin-top: 8px; font-size: 14px; }
summary { cursor: pointer; color: var(--soft); }
.scroll { overflow-x: auto; }
.data { font-size: 13.5px; }
.data th, .data td { padding: 4px 0 4px 12px; text-align: right; white-space: nowrap; }
.data tbody tr { border-top: 1px solid var(--grid); }
.data th:first-child { text-align: left; padding-left: 0; }
.data th { font-weight: 600; }
.data thead th { color: var(--soft); }
.designs { grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); }
.design .beside { margin-bottom: 0; }
.design ul { margin: 0 0 10px; padding-left: 1.2em; }
.design { padding: 18px 20px; border-top: 4px solid var(--own); min-width: 0; }
.design h3, .design p, pre { overflow-wrap: anywhere; }
.design p { margin: 4px 0 10px; }
pre {
  font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  background: var(--tint); border-radius: 8px; padding: 11px 13px; margin: 12px 0 0;
  white-space: pre-wrap; max-height: 15em; overflow: auto;
}
.lists { grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); margin-top: 44px; }
.lists .card { padding: 18px 22px; }
.lists h2 { margin: 0 0 8px; }
dl { margin: 0; }
dt { font-weight: 650; margin-top: 10px; }
dd { margin: 0; color: var(--soft); overflow-wrap: anywhere; }
footer { margin-top: 36px; }
@media (max-width: 1080px) {
  .summary table, .summary tbody, .summary tr, .summary td, .summary th { display: block; width: auto; }
  .summary thead { position: absolute; clip-path: inset(50%); }
  .summary tbody tr { display: grid; grid-template-columns: 1fr 1fr; padding: 12px 18px; gap: 4px 18px; }
  .summary tbody tr:first-child { border-top: 0; }
  .summary td, .summary tbody th { padding: 5px 0; max-width: none; }
  .summary :is(td, th):is(:first-child, :last-child) { padding-left: 0; padding-right: 0; }
  .summary td { order: 1; }
  .summary .scale { order: 2; padding-bottom: 0; }
  .summary .cost { order: 3; }
  .summary tbody th, .summary .scale { grid-column: 1 / -1; }
  .summary td[data-label]::before {
    content: attr(data-label); display: block; font-size: 12.5px; color: var(--soft);
  }
  .summary td.scale::before { text-align: center; background: var(--card); padding-bottom: 3px; }
}
@media (max-width: 560px) {
  .wrap { padding: 22px 14px 40px; }
  figure { padding: 14px 12px 12px; }
  .warnings { padding: 10px 14px; }
}
@media print {
  .legend, figcaption button { display: none; }
  .card, tr { break-inside: avoid; }
  pre { max-height: none; }
  body { background: none; }
}
"""

SCRIPT = """
(() => {
  "use strict";
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figure-data").textContent);
  const hidden = new Set();
  const colour = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const paint = (value, key) => {
    if (Array.isArray(value)) return value.map((item) => paint(item, ""));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, paint(item, name)]));
    return typeof value === "string" && key.endsWith("color") ? colour(value) : value;
  };
  const whole = new Set();
  const draw = () => {
    for (const [name, figure] of Object.entries(figures)) {
      const place = document.getElementById("plot-" + name);
      if (!figure || !place) continue;
      const { data, layout } = paint(figure, "");
      for (const trace of data) trace.visible = !hidden.has(trace.meta);
      for (const note of layout.annotations || []) note.visible = !hidden.has(Number(note.name ?? -1));
      layout.font.family = getComputedStyle(document.body).fontFamily;
      layout.font.size = place.clientWidth < 480 ? 11.5 : 13;
      layout.dragmode = matchMedia("(pointer: fine)").matches ? "zoom" : false;
      if (whole.has(name)) delete layout.yaxis.range;
      layout.datarevision = layout.uirevision = Math.random();
      Plotly.react(place, data, layout, {
        responsive: true, displaylogo: false,
        displayModeBar: matchMedia("(hover: hover)").matches && "hover",
        modeBarButtons: [["toImage", "resetScale2d"]],
        toImageButtonOptions: { format: "svg", filename: "heddle-" + name },
      });
    }
  };
  const toggle = (set, key, button, off) => {
    const had = set.delete(key);
    if (!had) set.add(key);
    button.setAttribute("aria-pressed", String(had === off));
    draw();
  };
  for (const button of document.querySelectorAll("[data-design]"))
    button.addEventListener("click", () => toggle(hidden, Number(button.dataset.design), button, true));
  for (const button of document.querySelectorAll("[data-whole]"))
    button.addEventListener("click", () => toggle(whole, button.dataset.whole, button, false));
  const paper = (on) => () => { root.classList.toggle("paper", on); draw(); };
  addEventListener("beforeprint", paper(true));
  addEventListener("afterprint", paper(false));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  for (const part of document.querySelectorAll(".needs-script")) part.hidden = false;
  draw();
})();
"""
