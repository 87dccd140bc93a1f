// Draws the figures with plotly in the page's colors, and lets the legend hide and show designs.
(() => {
  "use strict";
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figure-data").textContent);
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
  const hoverTemplate = (trace) =>
    `<b>%{${trace.customdata ? "customdata" : "fullData.name"}}</b><br>%{text}<extra></extra>`;

  const draw = () => {
    for (const [name, figure] of Object.entries(figures)) {
      const place = document.getElementById("plot-" + name);
      if (!figure || !place) continue;
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
      });
    }
  };

  const toggle = (set, key) => {
    if (!set.delete(key)) set.add(key);
    draw();
    return set.has(key);
  };
  for (const button of document.querySelectorAll("[data-design]"))
    button.addEventListener("click", () =>
      button.setAttribute("aria-pressed", String(!toggle(hiddenDesigns, Number(button.dataset.design)))));
  for (const button of document.querySelectorAll("[data-full-range]"))
    button.addEventListener("click", () =>
      button.setAttribute("aria-pressed", String(toggle(fullRangeFigures, button.dataset.fullRange))));

  // Print in the light scheme.
  const setPaper = (on) => () => { root.classList.toggle("paper", on); draw(); };
  addEventListener("beforeprint", setPaper(true));
  addEventListener("afterprint", setPaper(false));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  for (const element of document.querySelectorAll(".needs-script")) element.hidden = false;
  draw();
})();
