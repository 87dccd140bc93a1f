// Draws the figures with plotly in the page's colors, and lets the legend hide and show designs.
(() => {
  "use strict";
  const root = document.documentElement;
  let figures = {};
  const hiddenDesigns = new Set();
  const fullRangeFigures = new Set();
  const cssColor = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();

  // Colors are names of CSS variables; line breaks in texts become plotly's markup.
  const convert = (value, key) => {
    if (Array.isArray(value)) return value.map((item) => convert(item, key));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, convert(item, name)]));
    if (typeof value !== "string") return value;
    if (key.endsWith("color")) return cssColor(value);
    return key === "text" || key === "ticktext" ? value.replaceAll("\n", "<br>") : value;
  };
  // A hover text that names its line needs no title: its customdata is blank.
  const hoverTemplate = (trace) => trace.customdata?.[0] === " " ? "%{text}<extra></extra>"
    : `<b>%{${trace.customdata ? "customdata" : "fullData.name"}}</b><br>%{text}<extra></extra>`;

  // A figure is higher by its legend, which else takes the room of the plot where the page is narrow.
  const makeRoom = (place) => {
    const entries = [...place.querySelectorAll(".legend .traces")].map((entry) => entry.getBoundingClientRect());
    const high = entries.length
      ? Math.max(...entries.map((box) => box.bottom)) - Math.min(...entries.map((box) => box.top)) : 0;
    const height = high ? `calc(var(--plot-height) + ${Math.ceil(high)}px)` : "";
    if (place.style.height === height) return;
    place.style.height = height;
    Plotly.Plots.resize(place);
  };

  // A figure in a closed section has no size; it is drawn when the section opens.
  const draw = (within = document) => {
    for (const [name, figure] of Object.entries(figures)) {
      const place = document.getElementById("plot-" + name);
      if (!figure || !place || !within.contains(place) || place.closest("details:not([open])")) continue;
      const { data, layout } = convert(figure, "");
      for (const trace of data) {
        trace.visible = !hiddenDesigns.has(trace.meta);
        if (trace.hoverinfo !== "skip") trace.hovertemplate = hoverTemplate(trace);
      }
      for (const note of layout.annotations || []) note.visible = !hiddenDesigns.has(Number(note.name ?? -1));
      layout.font.family = getComputedStyle(document.body).fontFamily;
      layout.font.size = place.clientWidth < 480 ? 11.5 : 13;
      layout.dragmode = matchMedia("(pointer: fine)").matches ? "zoom" : false;
      if (fullRangeFigures.has(name)) delete layout.yaxis.range;
      layout.datarevision = layout.uirevision = Math.random();
      Plotly.react(place, data, layout, {
        responsive: true, displaylogo: false,
        displayModeBar: matchMedia("(hover: hover)").matches && "hover",
        modeBarButtons: [["toImage", "resetScale2d"]],
        toImageButtonOptions: { format: "svg", filename: "heddle-" + name },
      }).then(makeRoom);
    }
  };

  const toggle = (set, key) => {
    if (!set.delete(key)) set.add(key);
    show();
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-design], [data-full-range]");
    if (button?.dataset.design) toggle(hiddenDesigns, Number(button.dataset.design));
    if (button?.dataset.fullRange) toggle(fullRangeFigures, button.dataset.fullRange);
    const opener = event.target.closest("[data-open-sections]");
    if (opener) openSections(opener.getAttribute("aria-expanded") === "false");
  });
  const sections = () => [...document.querySelectorAll("details.section")];
  const openSections = (open) => {
    for (const section of sections()) section.open = open;
  };
  document.addEventListener("toggle", (event) => {
    if (event.target.open) draw(event.target);
    const opener = document.querySelector("[data-open-sections]");
    if (!opener) return;
    const all = sections().every((section) => section.open);
    opener.setAttribute("aria-expanded", String(all));
    opener.textContent = all ? "close all sections" : "open all sections";
  }, true);

  // The content as it is in the page; on a page that follows a command it is replaced from time to time.
  const show = () => {
    figures = JSON.parse(document.getElementById("figure-data").textContent);
    for (const element of document.querySelectorAll(".needs-script")) element.hidden = false;
    for (const button of document.querySelectorAll("[data-design]"))
      button.setAttribute("aria-pressed", String(!hiddenDesigns.has(Number(button.dataset.design))));
    for (const button of document.querySelectorAll("[data-full-range]"))
      button.setAttribute("aria-pressed", String(fullRangeFigures.has(button.dataset.fullRange)));
    draw();
  };
  addEventListener("heddle-content", show);

  // Print in the light scheme, with every section.
  let closed = [];
  const setPaper = (on) => () => {
    root.classList.toggle("paper", on);
    if (on) closed = sections().filter((section) => !section.open);
    for (const section of closed) section.open = on;
    draw();
  };
  addEventListener("beforeprint", setPaper(true));
  addEventListener("afterprint", setPaper(false));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
  show();
})();
