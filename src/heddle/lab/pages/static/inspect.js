// Draws the map of every head, and one head enlarged, with the text shaded by its weights.
(async () => {
  "use strict";
  const $ = (id) => document.getElementById(id);
  const create = (tag, className, text) =>
    Object.assign(document.createElement(tag), { className: className || "", textContent: text || "" });
  const { tokens, layers } = JSON.parse($("weights").textContent);
  const length = tokens.length;

  const inflate = async (text) => {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  };

  // A weight w is stored as the code round(255 · √w). colors[code] is its color as [red, green, blue].
  let colors = [], hiddenColor, inkColor, markColor;
  const readColors = () => {
    const style = getComputedStyle(document.documentElement);
    const rgb = (name) => [1, 3, 5].map((at) => parseInt(style.getPropertyValue(name).trim().slice(at, at + 2), 16));
    const stops = [0, 1, 2, 3, 4].map((number) => rgb("--heat-" + number));
    colors = Array.from({ length: 256 }, (_, code) => {
      const position = code / 255 * 4, low = Math.min(3, Math.floor(position)), fraction = position - low;
      return stops[low].map((value, channel) => Math.round(value + (stops[low + 1][channel] - value) * fraction));
    });
    hiddenColor = rgb("--unseen");
    inkColor = style.getPropertyValue("--ink");
    markColor = style.getPropertyValue("--series-2");
  };
  const css = (color) => `rgb(${color.join(",")})`;
  const isMasked = (layer, query, key) => layer.keys === length &&
    ((layer.causal && key > query) ||
      (layer.window !== null &&
        (layer.causal ? query - key >= layer.window : Math.abs(query - key) > layer.window)));
  const codeOf = (layer, head, query, key) => layer.bytes[(head * length + query) * layer.keys + key];
  const weightOf = (code) => (code / 255) ** 2;
  const weightText = (code) => code === 0 ? "less than 0.00001" : weightOf(code) >= 0.1
    ? weightOf(code).toFixed(2)
    : weightOf(code).toPrecision(1).replace(/e.*/, (e) => " × 10^" + Number(e.slice(1)));
  const tokenName = (index) => `“${tokens[index]}” (${index})`;

  // A small map has at most one cell per pixel. A cell shows the largest of its weights, so that thin lines stay visible.
  const drawSmall = (canvas, layer, head) => {
    const limit = Math.max(16, Math.floor(canvas.clientWidth * devicePixelRatio));
    const rows = Math.min(length, limit), columns = Math.min(layer.keys, limit);
    canvas.width = columns; canvas.height = rows;
    const image = new ImageData(columns, rows);
    for (let y = 0; y < rows; y++) for (let x = 0; x < columns; x++) {
      let largest = -1;
      for (let query = Math.floor(y * length / rows); query < (y + 1) * length / rows; query++)
        for (let key = Math.floor(x * layer.keys / columns); key < (x + 1) * layer.keys / columns; key++)
          if (!isMasked(layer, query, key)) largest = Math.max(largest, codeOf(layer, head, query, key));
      image.data.set([...(largest < 0 ? hiddenColor : colors[largest]), 255], 4 * (y * columns + x));
    }
    canvas.getContext("2d").putImageData(image, 0, 0);
  };

  const FOLDED_LAYERS = 6; // an even number: two columns
  const smallMaps = [];
  let shown = null, query = null, geometry = null; // shown: [layer, head] of the large map

  const open = (layerIndex, head) => {
    shown = [layerIndex, head]; query = query === null ? length - 1 : query;
    const layer = layers[layerIndex], group = Math.floor(head / (layer.heads / layer.groups));
    $("large-title").textContent = `Layer ${layerIndex}, head ${head}`;
    const sharing = layer.latent ||
      (layer.groups < layer.heads ? `group ${group} of ${layer.groups}` : "its own keys");
    $("large-facts").textContent = [layer.kind, `sees ${layer.visible_range}`, sharing].join(" · ");
    if (!$("large").open) $("large").showModal();
    location.replace(`#layer-${layerIndex}-head-${head}`);
    drawLarge(); shadeText(null);
  };

  const drawLarge = () => {
    const [layerIndex, head] = shown, layer = layers[layerIndex], canvas = $("matrix");
    const maxWidth = Math.min(innerWidth * (innerWidth > 900 ? 0.62 : 0.86), 820), maxHeight = innerHeight * 0.82;
    const cell = Math.max(1, Math.min(26, Math.floor(Math.min((maxWidth - 90) / layer.keys, (maxHeight - 150) / length))));
    const labels = cell >= 9, left = labels ? 92 : 4, top = labels ? 84 : 4;
    const scale = devicePixelRatio || 1, width = left + cell * layer.keys + 4, height = top + cell * length + 4;
    canvas.width = width * scale; canvas.height = height * scale;
    canvas.style.width = width + "px"; canvas.style.height = height + "px";
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    for (let i = 0; i < length; i++) for (let j = 0; j < layer.keys; j++) {
      pen.fillStyle = css(isMasked(layer, i, j) ? hiddenColor : colors[codeOf(layer, head, i, j)]);
      pen.fillRect(left + j * cell, top + i * cell, cell, cell);
    }
    if (labels) {
      pen.fillStyle = inkColor;
      pen.font = `${Math.min(13, cell - 1)}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace`;
      pen.textBaseline = "middle";
      const shorten = (word) => word.length > 10 ? word.slice(0, 9) + "…" : word;
      pen.textAlign = "right";
      for (let i = 0; i < length; i++) pen.fillText(shorten(tokens[i]), left - 6, top + (i + 0.5) * cell);
      pen.textAlign = "left";
      for (let j = 0; j < layer.keys; j++) {
        pen.save(); pen.translate(left + (j + 0.5) * cell, top - 6); pen.rotate(-Math.PI / 2);
        pen.fillText(shorten(layer.keys === length ? tokens[j] : String(j)), 0, 0); pen.restore();
      }
    }
    geometry = { left, top, cell, keys: layer.keys };
    pen.strokeStyle = markColor; pen.lineWidth = 1.5;
    pen.strokeRect(left - 0.5, top + query * cell - 0.5, cell * layer.keys + 1, cell + 1);
  };

  // Shade the text by the weights of the query; key: the token to describe, null for the one with the largest weight.
  const shadeText = (key) => {
    const [layerIndex, head] = shown, layer = layers[layerIndex];
    const keysAreTokens = layer.keys === length;
    const codes = Array.from({ length: layer.keys }, (_, j) => isMasked(layer, query, j) ? -1 : codeOf(layer, head, query, j));
    const largest = codes.indexOf(Math.max(...codes)), chosen = key === null ? largest : key;
    const keyName = keysAreTokens ? tokenName(chosen) : `position ${chosen} of the encoder output`;
    const steps = `, ${Math.abs(query - chosen)} ${chosen < query ? "back" : "ahead"}`;
    const distance = !keysAreTokens ? "" : chosen === query ? ", itself" : steps;
    $("pair").textContent = codes[chosen] < 0 ? `${tokenName(query)} cannot see ${keyName}${distance}.`
      : `${tokenName(query)} attends ${key === null ? "most " : ""}to ${keyName}${distance}: ${weightText(codes[chosen])}`;
    if (!keysAreTokens) return $("shaded").replaceChildren();
    [...$("shaded").children].forEach((span, j) => {
      span.style.background = codes[j] < 0 ? "none" : css(colors[codes[j]]);
      span.style.color = codes[j] > 140 ? "var(--card)" : "var(--ink)";
      span.classList.toggle("query", j === query);
    });
  };
  const select = (newQuery, key) => {
    if (newQuery === query) return shadeText(key);
    query = newQuery; drawLarge(); shadeText(key);
  };
  const step = (layerStep, headStep) => {
    let [layerIndex, head] = shown;
    if (layerStep) {
      do layerIndex += layerStep; while (layers[layerIndex] && !layers[layerIndex].heads);
      if (!layers[layerIndex]) return;
      head = Math.min(head, layers[layerIndex].heads - 1);
    } else head = (head + headStep + layers[layerIndex].heads) % layers[layerIndex].heads;
    open(layerIndex, head);
  };

  readColors();
  const rampBar = create("i");
  rampBar.style.background =
    `linear-gradient(90deg, ${[0, 1, 2, 3, 4].map((number) => `var(--heat-${number})`).join(",")})`;
  $("ramp").append("0", rampBar, "1, middle 0.25");
  const mostHeads = Math.max(...layers.map((layer) => layer.heads || 0));
  const isNarrow = innerWidth <= 900;
  if (isNarrow) for (const fold of document.querySelectorAll(".fold")) fold.open = false;
  let rows = null; // of some layers; on a phone all but the first are folded
  $("maps").style.setProperty("--heads", mostHeads);
  $("maps").style.setProperty("--columns", mostHeads > 8 || layers.length < 2 ? 1 : 2);
  for (const [index, layer] of layers.entries()) {
    if (index % FOLDED_LAYERS === 0) {
      const fold = create("details"), last = Math.min(index + FOLDED_LAYERS, layers.length) - 1;
      rows = create("div", "rows");
      fold.open = !isNarrow || index === 0;
      fold.addEventListener("toggle", () => fold.open && smallMaps.forEach((map) => drawSmall(...map)));
      fold.append(create("summary", "", last > index ? `Layers ${index} to ${last}` : `Layer ${index}`), rows);
      $("maps").append(isNarrow && layers.length > FOLDED_LAYERS ? fold : rows);
    }
    const row = create("div", "row"), label = create("div"), heads = create("div", "heads");
    const notes = create("small", "", layer.kind);
    label.append(create("b", "", `Layer ${index}`), notes);
    row.append(label, heads); rows.append(row);
    if (layer.codes) {
      layer.bytes = await inflate(layer.codes);
      const groups = layer.groups > 1 ? `${layer.groups} groups` : "one group";
      const sharing = layer.latent || (layer.groups < layer.heads ? groups : "");
      const range = layer.window === null ? layer.visible_range : `window ${layer.window}`;
      notes.textContent = [layer.kind, range, sharing].filter(Boolean).join(", ");
      const perGroup = layer.latent ? layer.heads : layer.heads / layer.groups;
      for (let first = 0; first < layer.heads; first += perGroup) {
        const group = create("div", "group" + (layer.latent ? " latent" : perGroup === 1 ? " alone" : ""));
        heads.append(group);
        for (let head = first; head < first + perGroup; head++) {
          const button = create("button", "map"), canvas = create("canvas");
          button.type = "button"; button.title = `Layer ${index}, head ${head}`;
          button.setAttribute("aria-label", button.title);
          button.addEventListener("click", () => open(index, head));
          button.append(canvas); group.append(button);
          smallMaps.push([canvas, layer, head]); drawSmall(canvas, layer, head);
        }
      }
    } else heads.append(create("small", "", "no attention weights: a recurrent state, or no mixer"));
  }
  for (const [index, token] of tokens.entries()) {
    const span = create("span", "token", token);
    span.addEventListener("click", () => select(index, null));
    $("shaded").append(span);
  }

  const onPointer = (event) => {
    const box = $("matrix").getBoundingClientRect(), stretch = box.width / parseFloat($("matrix").style.width);
    const key = Math.floor(((event.clientX - box.left) / stretch - geometry.left) / geometry.cell);
    const row = Math.floor(((event.clientY - box.top) / stretch - geometry.top) / geometry.cell);
    if (row >= 0 && row < length && key >= 0 && key < geometry.keys) select(row, key);
  };
  $("matrix").addEventListener("pointermove", onPointer);
  $("matrix").addEventListener("pointerdown", onPointer);
  $("previous").addEventListener("click", () => step(0, -1));
  $("next").addEventListener("click", () => step(0, 1));
  $("close").addEventListener("click", () => $("large").close());
  $("large").addEventListener("close", () => history.replaceState(null, "", location.pathname));
  $("large").addEventListener("click", (event) => { if (event.target === $("large")) $("large").close(); });
  addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (steps && $("large").open) { event.preventDefault(); step(...steps); }
  });
  const redraw = () => {
    readColors();
    for (const map of smallMaps) drawSmall(...map);
    if ($("large").open) { drawLarge(); shadeText(null); }
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("resize", redraw);
  for (const element of document.querySelectorAll(".needs-script")) element.hidden = false;
  const requested = /^#layer-(\d+)-head-(\d+)$/.exec(location.hash);
  const [layerIndex, head] = requested ? [Number(requested[1]), Number(requested[2])] : [-1, 0];
  if (layers[layerIndex] && head < layers[layerIndex].heads) open(layerIndex, head);
})();
