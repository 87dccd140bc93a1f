"""What the page of `heddle inspect` adds to the look of a report: the maps' styles, and the script that draws them."""

# One hue from light to dark (in the dark look from dark to light): its order shows in grey and to any eye.
EXTRA_CSS = """
:root {
  --heat-0: #ffffff; --heat-1: #cfe3f1; --heat-2: #7db4da; --heat-3: #2273b4; --heat-4: #0a2b5e;
  --unseen: #eceae4;
}
@media (prefers-color-scheme: dark) {
  :root:not(.paper) {
    --heat-0: #171b21; --heat-1: #15395c; --heat-2: #1f6fae; --heat-3: #62b6ec; --heat-4: #eef8ff; --unseen: #2a3039;
  }
}
.passage, .layers { padding: 4px 22px 16px; margin-top: 22px; }
.passage h2, .layers h2 { margin: 14px 0 8px; }
.layers { margin-top: 44px; }
.layers td:nth-child(4), .layers td:nth-child(3) { white-space: normal; }
.layers th small { display: block; font-weight: 400; max-width: 24em; white-space: normal; }
.tokens {
  font: 13.5px/1.9 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  margin: 0; overflow-wrap: anywhere;
}
.token { white-space: pre-wrap; padding: 2px 1px; border-radius: 3px; box-shadow: 0 0 0 1px var(--grid); }
.token { margin-right: 1px; }
.maps { container-type: inline-size; --columns: 1; }
.rows { display: grid; gap: 14px 26px; grid-template-columns: repeat(var(--columns), 1fr); }
.row { display: flex; align-items: center; gap: 12px; }
.row > div:first-child { width: 150px; flex: none; line-height: 1.3; }
.row b { display: block; }
.row small { display: block; line-height: 1.3; }
.heads { display: flex; flex-wrap: wrap; gap: 8px 7px; }
.group { display: flex; gap: 3px; padding-bottom: 4px; border-bottom: 3px solid var(--line); }
.group.alone { border-bottom-color: transparent; }
.group.latent { border-bottom-style: dashed; border-bottom-color: var(--series-2); }
.map { padding: 0; border: 0; border-radius: 2px; background: none; line-height: 0; }
.map canvas {
  width: clamp(20px, calc((100cqw / var(--columns) - 190px) / var(--heads) - 5px), 118px);
  aspect-ratio: 1; border-radius: 2px; image-rendering: pixelated; display: block;
  box-shadow: 0 0 0 1px var(--line);
}
.map:hover canvas { box-shadow: 0 0 0 2px var(--series-2); }
#ramp { display: inline-block; white-space: nowrap; margin-left: 10px; }
#ramp i { display: inline-block; width: 130px; height: 10px; border-radius: 3px; margin: 0 6px; vertical-align: -1px; }
dialog {
  border: 1px solid var(--line); border-radius: 14px; background: var(--card); color: var(--ink);
  width: min(1240px, 96vw); max-height: 96vh; padding: 18px 22px;
}
dialog::backdrop { background: rgba(10, 12, 16, 0.55); }
dialog .head { display: flex; justify-content: space-between; gap: 20px; align-items: flex-start; }
dialog .head p { margin: 2px 0 12px; }
.turn { display: flex; gap: 8px; }
.turn button { padding: 4px 12px; white-space: nowrap; }
.sides { display: grid; grid-template-columns: auto minmax(240px, 1fr); gap: 22px; align-items: start; }
#matrix { max-width: 100%; touch-action: manipulation; }
#pair { margin: 0 0 12px; min-height: 3.1em; }
#shaded + p { margin-top: 14px; }
#shaded .token { cursor: pointer; }
#shaded .query { box-shadow: 0 0 0 2px var(--series-2); }
@media (max-width: 900px) {
  .maps { --columns: 1 !important; }
  .sides { grid-template-columns: 1fr; }
  .row { align-items: flex-start; flex-direction: column; gap: 4px; }
  .row > div:first-child { width: auto; }
  .row :is(b, small) { display: inline; margin-right: 8px; }
}
@media print { dialog { display: none; } }
"""

SCRIPT = """
(async () => {
  "use strict";
  const $ = (id) => document.getElementById(id);
  const make = (tag, kind, text) =>
    Object.assign(document.createElement(tag), { className: kind || "", textContent: text || "" });
  const { tokens, layers } = JSON.parse($("weights").textContent);
  const side = tokens.length;
  const inflate = async (text) => {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  };
  let ramp = [];
  const readRamp = () => {
    const style = getComputedStyle(document.documentElement);
    const rgb = (name) => [1, 3, 5].map((at) => parseInt(style.getPropertyValue(name).trim().slice(at, at + 2), 16));
    const stops = [0, 1, 2, 3, 4].map((number) => rgb("--heat-" + number));
    ramp = Array.from({ length: 256 }, (_, code) => {
      const place = code / 255 * 4, low = Math.min(3, Math.floor(place)), part = place - low;
      return stops[low].map((value, channel) => Math.round(value + (stops[low + 1][channel] - value) * part));
    });
    ramp.unseen = rgb("--unseen");
    ramp.ink = style.getPropertyValue("--ink"); ramp.mark = style.getPropertyValue("--series-2");
  };
  const css = (code) => `rgb(${ramp[code].join(",")})`;
  const unseen = (layer, i, j) => layer.keys === side &&
    ((layer.causal && j > i) ||
      (layer.reach !== null && (layer.causal ? i - j >= layer.reach : Math.abs(i - j) > layer.reach)));
  const code = (layer, head, i, j) => layer.bytes[(head * side + i) * layer.keys + j];
  // A small map has a spot a pixel at most, and shows the largest weight of each, so that thin lines do not fade.
  const paintSmall = (canvas, layer, head) => {
    const most = Math.max(16, Math.floor(canvas.clientWidth * devicePixelRatio));
    const rows = Math.min(side, most), columns = Math.min(layer.keys, most);
    canvas.width = columns; canvas.height = rows;
    const image = new ImageData(columns, rows);
    for (let y = 0; y < rows; y++) for (let x = 0; x < columns; x++) {
      let best = -1;
      for (let i = Math.floor(y * side / rows); i < (y + 1) * side / rows; i++)
        for (let j = Math.floor(x * layer.keys / columns); j < (x + 1) * layer.keys / columns; j++)
          if (!unseen(layer, i, j)) best = Math.max(best, code(layer, head, i, j));
      image.data.set([...(best < 0 ? ramp.unseen : ramp[best]), 255], 4 * (y * columns + x));
    }
    canvas.getContext("2d").putImageData(image, 0, 0);
  };
  const small = [];
  let at = null, query = null, drawn = null;
  const weight = (value) => (value / 255) ** 2;
  const shown = (value) => value === 0 ? "less than 0.00001" : weight(value) >= 0.1
    ? weight(value).toFixed(2) : weight(value).toPrecision(1).replace(/e.*/, (e) => " × 10^" + Number(e.slice(1)));
  const name = (index) => `“${tokens[index]}” (${index})`;

  const open = (layer, head) => {
    at = [layer, head]; query = query === null ? side - 1 : query;
    const info = layers[layer], group = Math.floor(head / (info.heads / info.groups));
    $("large-title").textContent = `Layer ${layer}, head ${head}`;
    const shares = info.latent || (info.groups < info.heads ? `group ${group} of ${info.groups}` : "keys of its own");
    $("large-facts").textContent = [info.kind, `sees ${info.sees}`, shares].join(" · ");
    if (!$("large").open) $("large").showModal();
    location.replace(`#layer-${layer}-head-${head}`);
    drawLarge(); shade(null);
  };
  const drawLarge = () => {
    const [layer, head] = at, info = layers[layer], canvas = $("matrix");
    const room = Math.min(innerWidth * (innerWidth > 900 ? 0.62 : 0.86), 820), high = innerHeight * 0.82;
    const cell = Math.max(1, Math.min(26, Math.floor(Math.min((room - 90) / info.keys, (high - 150) / side))));
    const labels = cell >= 9, left = labels ? 92 : 4, top = labels ? 84 : 4;
    const scale = devicePixelRatio || 1, width = left + cell * info.keys + 4, height = top + cell * side + 4;
    canvas.width = width * scale; canvas.height = height * scale;
    canvas.style.width = width + "px"; canvas.style.height = height + "px";
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    for (let i = 0; i < side; i++) for (let j = 0; j < info.keys; j++) {
      pen.fillStyle = unseen(info, i, j) ? `rgb(${ramp.unseen.join(",")})` : css(code(info, head, i, j));
      pen.fillRect(left + j * cell, top + i * cell, cell, cell);
    }
    if (labels) {
      pen.fillStyle = ramp.ink;
      pen.font = `${Math.min(13, cell - 1)}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace`;
      pen.textBaseline = "middle";
      const cut = (word) => word.length > 10 ? word.slice(0, 9) + "…" : word;
      pen.textAlign = "right";
      for (let i = 0; i < side; i++) pen.fillText(cut(tokens[i]), left - 6, top + (i + 0.5) * cell);
      pen.textAlign = "left";
      for (let j = 0; j < info.keys; j++) {
        pen.save(); pen.translate(left + (j + 0.5) * cell, top - 6); pen.rotate(-Math.PI / 2);
        pen.fillText(cut(info.keys === side ? tokens[j] : String(j)), 0, 0); pen.restore();
      }
    }
    drawn = { left, top, cell, keys: info.keys };
    pen.strokeStyle = ramp.mark; pen.lineWidth = 1.5;
    pen.strokeRect(left - 0.5, top + query * cell - 0.5, cell * info.keys + 1, cell + 1);
  };
  const shade = (key) => {
    const [layer, head] = at, info = layers[layer];
    const square = info.keys === side;
    const row = Array.from({ length: info.keys }, (_, j) => unseen(info, query, j) ? -1 : code(info, head, query, j));
    const best = row.indexOf(Math.max(...row)), chosen = key === null ? best : key;
    const other = square ? name(chosen) : `place ${chosen} of the memory`;
    const steps = `, ${Math.abs(query - chosen)} ${chosen < query ? "back" : "ahead"}`;
    const away = !square ? "" : chosen === query ? ", itself" : steps;
    $("pair").textContent = row[chosen] < 0 ? `${name(query)} cannot see ${other}${away}.`
      : `${name(query)} ${key === null ? "looks most at" : "looks at"} ${other}${away}: ${shown(row[chosen])}`;
    if (!square) return $("shaded").replaceChildren();
    [...$("shaded").children].forEach((span, j) => {
      span.style.background = row[j] < 0 ? "none" : css(row[j]);
      span.style.color = row[j] > 140 ? "var(--card)" : "var(--ink)";
      span.classList.toggle("query", j === query);
    });
  };
  const look = (next, key) => {
    if (next === query) return shade(key);
    query = next; drawLarge(); shade(key);
  };
  const turn = (layerStep, headStep) => {
    let [layer, head] = at;
    if (layerStep) {
      do layer += layerStep; while (layers[layer] && !layers[layer].heads);
      if (!layers[layer]) return;
      head = Math.min(head, layers[layer].heads - 1);
    } else head = (head + headStep + layers[layer].heads) % layers[layer].heads;
    open(layer, head);
  };

  readRamp();
  const ends = $("ramp");
  const bar = make("i");
  const paintBar = () => { bar.style.background =
    `linear-gradient(90deg, ${[0, 1, 2, 3, 4].map((number) => `var(--heat-${number})`).join(",")})`; };
  ends.append("0", bar, "1, middle 0.25");
  paintBar();
  const widest = Math.max(...layers.map((layer) => layer.heads || 0));
  const rows = make("div", "rows");
  $("maps").append(rows);
  $("maps").style.setProperty("--heads", widest);
  $("maps").style.setProperty("--columns", widest > 8 || layers.length < 2 ? 1 : 2);
  for (const [index, layer] of layers.entries()) {
    const row = make("div", "row"), label = make("div"), heads = make("div", "heads");
    const notes = make("small", "", layer.kind);
    label.append(make("b", "", `Layer ${index}`), notes);
    row.append(label, heads); rows.append(row);
    if (layer.codes) {
      layer.bytes = await inflate(layer.codes);
      const groups = layer.groups > 1 ? `${layer.groups} groups` : "one group";
      const shared = layer.latent || (layer.groups < layer.heads ? groups : "");
      const reach = layer.reach === null ? layer.sees : `window ${layer.reach}`;
      notes.textContent = [layer.kind, reach, shared].filter(Boolean).join(", ");
      const each = layer.latent ? layer.heads : layer.heads / layer.groups;
      for (let first = 0; first < layer.heads; first += each) {
        const group = make("div", "group" + (layer.latent ? " latent" : each === 1 ? " alone" : ""));
        heads.append(group);
        for (let head = first; head < first + each; head++) {
          const button = make("button", "map"), canvas = make("canvas");
          button.type = "button"; button.title = `Layer ${index}, head ${head}`;
          button.setAttribute("aria-label", button.title);
          button.addEventListener("click", () => open(index, head));
          button.append(canvas); group.append(button);
          small.push([canvas, layer, head]); paintSmall(canvas, layer, head);
        }
      }
    } else heads.append(make("small", "", "no weights: it keeps a summary, or mixes nothing"));
  }
  for (const [index, word] of tokens.entries()) {
    const span = make("span", "token", word);
    span.addEventListener("click", () => look(index, null));
    $("shaded").append(span);
  }
  const over = (event) => {
    const box = $("matrix").getBoundingClientRect(), stretch = box.width / parseFloat($("matrix").style.width);
    const j = Math.floor(((event.clientX - box.left) / stretch - drawn.left) / drawn.cell);
    const i = Math.floor(((event.clientY - box.top) / stretch - drawn.top) / drawn.cell);
    if (i >= 0 && i < side && j >= 0 && j < drawn.keys) look(i, j);
  };
  $("matrix").addEventListener("pointermove", over);
  $("matrix").addEventListener("pointerdown", over);
  $("before").addEventListener("click", () => turn(0, -1));
  $("after").addEventListener("click", () => turn(0, 1));
  $("close").addEventListener("click", () => $("large").close());
  $("large").addEventListener("close", () => history.replaceState(null, "", location.pathname));
  $("large").addEventListener("click", (event) => { if (event.target === $("large")) $("large").close(); });
  addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (step && $("large").open) { event.preventDefault(); turn(...step); }
  });
  const again = () => {
    readRamp();
    for (const one of small) paintSmall(...one);
    if ($("large").open) { drawLarge(); shade(null); }
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  addEventListener("resize", again);
  for (const part of document.querySelectorAll(".needs-script")) part.hidden = false;
  const wanted = /^#layer-(\\d+)-head-(\\d+)$/.exec(location.hash);
  const [layer, head] = wanted ? [Number(wanted[1]), Number(wanted[2])] : [-1, 0];
  if (layers[layer] && head < layers[layer].heads) open(layer, head);
})();
"""
