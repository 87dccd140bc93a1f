// The page: choices on the left, results on the right. The address holds the choice.
"use strict";
const $ = id => document.getElementById(id);
const copy = value => JSON.parse(JSON.stringify(value));
const TITLES = { mixers: "Mixer", positions: "Position", feedforwards: "Feed-forward", residuals: "Residual", norms: "Norm", scalings: "Scaling" };
const ADDITIVE = ["learned", "sinusoidal"];
let state = stateFrom(location.hash.slice(1));
let position = 12, drawn = "";

// ---- the chosen part ----
const layer = () => state.design.layers[state.layer];
const holder = slot => ["mixers", "feedforwards"].includes(slot) ? layer() : state.design;
const mixerTakes = name => layer().mixer && kindOf("mixers", layer().mixer.kind).fields.some(field => field.name === "position" && field.choices.includes(name));

function chosen(slot = state.slot) {
  if (slot === "positions") return layer().mixer?.position ?? state.design.embedding?.position ?? null;
  if (slot === "scalings") return layer().mixer?.position?.scaling ?? null;
  return holder(slot)[SINGULAR[slot]] ?? null;
}

function choose(slot, part) {
  if (slot === "scalings") {
    if (part && layer().mixer?.position?.kind !== "rope") choose("positions", { kind: "rope" });
    if (part) {
      layer().mixer.position.scaling = part;
      delete layer().mixer.position.inv_freq;
    } else delete layer().mixer?.position?.scaling;
  } else if (slot !== "positions") holder(slot)[SINGULAR[slot]] = part;
  else {
    delete layer().mixer?.position;
    delete state.design.embedding?.position;
    if (part && ADDITIVE.includes(part.kind)) state.design.embedding = { ...state.design.embedding, position: part };
    else if (part) {
      if (!mixerTakes(part.kind)) layer().mixer = { kind: "attention", heads: layer().mixer?.heads ?? 8 };
      layer().mixer.position = part;
    }
  }
}

// A part of another kind, with the fields that both kinds have.
function another(slot, name, old) {
  const kind = kindOf(slot, name), part = copy(kind.first);
  for (const field of kind.fields) {
    const value = old?.[field.name];
    if (value === undefined) continue;
    if (field.type !== "part" ? field.type !== "choice" || field.choices.includes(value) : value && field.choices.includes(value.kind)) part[field.name] = value;
  }
  if (name === "learned") part.length = Math.max(part.length, state.design.tokens);
  return part;
}

// ---- the form ----
function fieldInput(field, part, id) {
  const value = part[field.name], label = html`<span>${field.name}${field.optional ? "" : field.default === null ? " *" : ""}</span>`, note = field.note ? html`<small>${field.note}</small>` : "";
  if (field.type === "part") {
    const options = [field.optional ? html`<option value="">none</option>` : "", ...field.choices.map(name => html`<option ${value?.kind === name ? "selected" : ""}>${name}</option>`)];
    const inner = value ? kindOf(field.slot, value.kind).fields.map(each => fieldInput(each, value, `${id}.${each.name}`)) : "";
    return html`<fieldset><label for="${id}">${label}<select id="${id}">${options}</select></label>${note}${inner}</fieldset>`;
  }
  if (field.type === "boolean") return html`<label class="check" for="${id}"><input type="checkbox" id="${id}" ${(value ?? field.default) ? "checked" : ""}>${label}</label>${note}`;
  if (field.type === "choice") {
    const now = value === undefined ? field.default : value;
    const options = field.choices.map(word => html`<option ${String(now) === word ? "selected" : ""}>${word}</option>`);
    return html`<label for="${id}">${label}<select id="${id}">${field.optional ? html`<option value="">–</option>` : ""}${options}</select></label>${note}`;
  }
  const hint = field.default ?? (field.optional ? "default" : "");
  return html`<label for="${id}">${label}<input id="${id}" type="number" step="${field.type === "integer" ? 1 : "any"}" ${field.least === null ? "" : html`min="${field.least}"`} value="${value ?? ""}" placeholder="${hint}"></label>${note}`;
}

function drawForm() {
  const focused = document.activeElement?.id, design = state.design, part = chosen();
  write("tabs", DATA.pages.length < 2 ? "" : DATA.pages.map(slot => html`<button type="button" id="tab-${slot}" role="tab" aria-selected="${slot === state.slot}">${TITLES[slot]}</button>`));
  const number = (id, label, value) => html`<label for="${id}"><span>${label}</span><input id="${id}" type="number" min="1" step="1" value="${value ?? ""}"></label>`;
  const entries = design.layers.length < 2 ? "" : html`<label for="design-entry"><span>layers shown</span><select id="design-entry">${design.layers.map((each, index) => html`<option value="${index}" ${index === state.layer ? "selected" : ""}>${each.count} ${isShared(each) ? "visits of " : "× "}${each.mixer?.kind ?? "no mixer"}${each.mixer?.window ? `, window ${each.mixer.window}` : ""}, ${each.feedforward?.kind ?? "no feed-forward"}</option>`)}</select></label>`;
  const shared = layer().count < 2 ? "" : html`<label class="check" for="layer-shared"><input type="checkbox" id="layer-shared" ${layer().shared ? "checked" : ""}>one set of weights</label>`;
  const whole = DATA.whole ? [number("design-vocab_size", "vocabulary", design.vocab_size), number("layer-count", "layers", layer().count), shared, entries] : "";
  const models = DATA.whole ? html`<label for="design-model"><span>start from</span><select id="design-model"><option value="">this design</option>${byFamily(DATA.models).map(([family, models]) => html`<optgroup label="${family}">${models.map(model => html`<option value="${DATA.models.indexOf(model)}">${model.name}</option>`)}</optgroup>`)}</select></label>` : "";
  write("around", [models, number("design-width", "model width", design.width), number("design-tokens", "context, tokens", design.tokens),
    html`<label for="design-bytes"><span>numbers</span><select id="design-bytes">${[4, 2].map(bytes => html`<option value="${bytes}" ${design.bytes === bytes ? "selected" : ""}>${FORMATS[bytes]}</option>`)}</select></label>`, whole]);
  const none = ["positions", "mixers", "feedforwards", "scalings"].includes(state.slot) && (["positions", "scalings"].includes(state.slot) || DATA.whole) ? [["", "none"]] : [];
  write("kinds", [...DATA.slots[state.slot].map(kind => [kind.kind, kind.kind]), ...none].map(([value, name]) => html`<button type="button" id="kind-${value}" data-kind="${value}" aria-pressed="${(part?.kind ?? "") === value}">${name}</button>`));
  write("fields", part ? kindOf(state.slot, part.kind).fields.map(field => fieldInput(field, part, `field.${field.name}`)) : "");
  if (focused) $(focused)?.focus();
}

function setField(id, input) {
  const names = id.split(".").slice(1), last = names.pop();
  let part = chosen(), slot = state.slot;
  for (const name of names) { slot = kindOf(slot, part.kind).fields.find(field => field.name === name).slot; part = part[name]; }
  const field = kindOf(slot, part.kind).fields.find(each => each.name === last);
  if (field.type === "boolean") part[last] = input.checked;
  else if (field.type === "part") { if (input.value) part[last] = another(field.slot, input.value, part[last]); else delete part[last]; }
  else if (input.value === "") delete part[last];
  else part[last] = field.type === "choice" ? ({ true: true, false: false })[input.value] ?? input.value : Number(input.value);
  return field.type === "part";
}

// ---- results ----
const short = value => value >= 1e15 ? value.toExponential(2) : value >= 1e12 ? `${amount(value / 1e12)} T` : value >= 1e9 ? `${amount(value / 1e9)} B` : value >= 1e6 ? `${amount(value / 1e6)} M` : value >= 1e4 ? `${amount(value / 1e3)} k` : amount(value);
const FORMATS = { 4: "float32", 2: "bfloat16" };
const bytesOf = value => value >= 1e12 ? `${amount(value / 1e12)} TB` : value >= 1e9 ? `${amount(value / 1e9)} GB` : value >= 1e6 ? `${amount(value / 1e6)} MB` : value >= 1e3 ? `${amount(value / 1e3)} kB` : `${amount(value)} B`;

const heldByMixer = design => state.slot === "scalings" || state.slot === "positions" && !design.embedding?.position;

function numbers(design) {
  const { sums, slots } = sizes(design, state.layer), own = slots[heldByMixer(design) ? "mixers" : state.slot];
  const shown = DATA.whole ? sums : own ?? [0, 0, 0, 0, 0];
  const cards = [["parameters", shown[0], short(shown[0]), amount(shown[0])], ["active for a token", shown[0] - shown[1], short(shown[0] - shown[1]), amount(shown[0] - shown[1])],
    ["FLOPs per token", shown[2] / design.tokens, short(shown[2] / design.tokens), `forward pass, the mean over ${amount(design.tokens)} tokens`],
    ["state", stateBytes(shown, design), bytesOf(stateBytes(shown, design)), `after ${amount(design.tokens)} tokens, one sequence in ${FORMATS[design.bytes]}`]];
  const share = DATA.whole && own ? html`<p class="small">The ${TITLES[state.slot].toLowerCase()} of one layer: ${amount(own[0])} parameters, ${short(own[2] / design.tokens)} FLOPs per token, ${bytesOf(stateBytes(own, design))} of state at ${amount(design.tokens)} tokens.</p>` : heldByMixer(design) ? html`<p class="small">The numbers are for the mixer that contains it.</p>` : state.slot === "norms" ? html`<p class="small">For one norm over the model’s width.</p>` : "";
  return html`<div class="numbers">${cards.map(([name, , big, detail]) => html`<div><span>${name}</span><strong>${big}</strong><small>${detail}</small></div>`)}</div>${share}`;
}

// Models by family, both in the order of their names.
function byFamily(models) {
  const families = {}, sorted = (a, b) => a.localeCompare(b, "en", { numeric: true });
  for (const model of models) (families[model.family] ??= []).push(model);
  return Object.keys(families).sort(sorted).map(family => [family, families[family].sort((a, b) => sorted(a.name, b.name))]);
}

function curve(title, valueAt, unit) {
  const contexts = Array.from({ length: 25 }, (_, index) => Math.round(2 ** (7 + index * 13 / 24)));
  const lines = [[state.design, SERIES[0], "now"], ...(state.pinned && !refusals(state.pinned).length ? [[state.pinned, SERIES[1], "pinned"]] : [])].map(([design, stroke, name]) => ({ stroke, name, values: contexts.map(tokens => valueAt({ ...design, tokens })) }));
  const all = lines.flatMap(each => each.values).filter(value => value > 0);
  if (!all.length) return "";
  const low = Math.floor(Math.log10(Math.min(...all)) - 0.1), high = Math.ceil(Math.log10(Math.max(...all)) + 0.1);
  const x = tokens => 64 + (Math.log2(tokens) - 7) / 13 * 320, y = value => 150 - (Math.log10(Math.max(value, 10 ** low)) - low) / (high - low) * 126;
  const step = Math.max(1, Math.round((high - low) / 5));
  const body = [];
  for (let power = low; power <= high; power += step) body.push(line(64, y(10 ** power), 388, y(10 ** power), "var(--grid)"), text(58, y(10 ** power) + 4, unit(10 ** power), html`text-anchor="end" class="tick"`));
  for (const power of [8, 11, 14, 17, 20]) body.push(text(x(2 ** power), 168, ["256", "2 k", "16 k", "131 k", "1 M"][[8, 11, 14, 17, 20].indexOf(power)], html`text-anchor="middle" class="tick"`));
  const here = state.design.tokens;
  if (here >= 128 && here <= 2 ** 20) body.push(line(x(here), 20, x(here), 150, "var(--soft)", html`stroke-dasharray="3 4"`));
  for (const { stroke, values, name } of lines.reverse()) {
    body.push(path("M" + values.map((value, index) => `${round(x(contexts[index]))} ${round(y(value))}`).join("L"), stroke, html`stroke-width="2.6"`));
    if (state.pinned) body.push(text(384, y(values[24]) - 6, name, html`text-anchor="end" class="tick" style="fill:${stroke}"`));
  }
  return html`<figure>${svg(400, 190, title, [text(64, 12, title), body, text(226, 185, "context, tokens", html`text-anchor="middle" class="tick"`)])}</figure>`;
}

function curves() {
  const pick = design => { const all = sizes(design, Math.min(state.layer, design.layers.length - 1)); return DATA.whole ? all.sums : all.slots[state.slot === "scalings" ? "mixers" : state.slot] ?? [0, 0, 0, 0, 0]; };
  return [curve("state of one sequence, bytes", design => stateBytes(pick(design), design), bytesOf), curve("FLOPs per token, mean over the context", design => pick(design)[2] / design.tokens, short)];
}

function pictures(slot, part) {
  const around = surroundings(state.design, layer());
  if (slot === "positions") return positionPictures(part, layer().mixer ? complete("mixers", layer().mixer, around) : {}, position);
  if (slot === "scalings") return scalingPicture(part, layer().mixer.position, complete("mixers", layer().mixer, around));
  const none = html`<p class="small">No picture of this kind is known.</p>`;
  const v = complete(slot, part, around);
  if (slot === "feedforwards") return feedforwardPicture(part, v);
  if (slot === "residuals") return residualPicture(part) || none;
  if (slot === "norms") return ["rms", "layer"].includes(part.kind) ? normPicture(part) : none;
  const inner = innerParts(slot, part);
  if (inner.length) return inner.map(([name, each]) => [html`<h4>${name}: ${each.kind}</h4>`, pictures(slot, each)]);
  const rotated = part.position ? positionPictures(part.position, v, position) : "";
  const hasKeys = v.heads && (v.head_dim || v.kv_rank); // heads may be blocks of gates
  return [maskPicture(part, v), hasKeys ? [headsPicture(part, v), cachePicture(part, v)] : "", rotated];
}

function shapes(slot, part) {
  if (slot === "scalings") return shapes("mixers", layer().mixer);
  const v = complete(slot, part, surroundings(state.design, layer())), rows = [["x", ["B", "T", v.width]]];
  if (slot === "mixers" && v.heads && v.head_dim) {
    const groups = v.kv_heads || v.key_heads || v.groups || v.heads, keys = part.kind === "mamba2" ? v.state_size : v.head_dim;
    rows.push(["q", ["B", part.kind === "mamba2" ? groups : part.kind === "gated_delta" ? groups : v.heads, "T", keys]], ["k", ["B", groups, "T", keys]], ["v", ["B", isRecurrent(part) ? v.heads : groups, "T", part.kind === "mamba2" ? v.head_dim : v.value_dim]]);
    if (isRecurrent(part)) rows.push(["state", ["B", v.heads, keys * (v.is_feature_map_learned ? 2 : 1), part.kind === "mamba2" ? v.head_dim : v.value_dim + (part.kind === "linear_attention" ? 1 : 0)]]);
  }
  if (part.kind === "latent_attention") rows.push(["q", ["B", v.heads, "T", v.nope_dim + v.rope_dim]], ["latent", ["B", "T", v.kv_rank]], ["k, rotated", ["B", "T", v.rope_dim]], ["v", ["B", v.heads, "T", v.value_dim]]);
  if (slot === "feedforwards") rows.push(["hidden", part.kind === "moe" ? ["B", "T", v.top_k, v.hidden] : ["B", "T", v.hidden]]);
  if (part.kind === "hyper_connections") rows.push(["streams", ["B", "T", v.streams, v.width]]);
  if (part.kind === "moe") rows.push(["router logits", ["B", "T", v.experts]]);
  rows.push(["y", ["B", "T", v.width]]);
  return html`<div class="scroll"><table class="data shapes"><tbody>${rows.map(([name, dims]) => html`<tr><th scope="row">${name}</th><td>[${dims.join(", ")}]</td></tr>`)}</tbody></table></div>`;
}

function yaml(value, indent = "") {
  const word = each => typeof each === "string" ? (/^[a-z][\w.-]*$/i.test(each) && !["true", "false", "null", "yes", "no", "on", "off"].includes(each.toLowerCase()) ? each : JSON.stringify(each)) : String(each);
  const lines = [];
  for (const [name, each] of Object.entries(value)) {
    if (each === undefined || each === null) continue;
    if (Array.isArray(each) && typeof each[0] === "object") { lines.push(`${indent}${name}:`); for (const item of each) { const inner = yaml(item, indent + "  "); lines.push(`${indent}- ${inner.trimStart()}`); } }
    else if (Array.isArray(each)) lines.push(`${indent}${name}: [${each.map(word).join(", ")}]`);
    else if (typeof each === "object") { if (Object.keys(each).length) lines.push(`${indent}${name}:`, yaml(each, indent + "  ")); }
    else lines.push(`${indent}${name}: ${word(each)}`);
  }
  return lines.join("\n");
}

function designData(design) {
  const { width, vocab_size, layers, residual, norm, embedding, head } = design;
  return { vocab_size, width, layers: layers.map(layer => ({ repeat: layer.count, shared: isShared(layer) ? true : undefined, mixer: layer.mixer, feedforward: layer.feedforward })), norm, residual, embedding: embedding && Object.keys(embedding).length ? embedding : undefined, head };
}

const uses = (value, slot, name) => {
  const { layers, residual, norm, embedding } = value;
  if (slot === "residuals" || slot === "norms") return (slot === "norms" ? norm : residual).kind === name;
  if (slot === "positions") return embedding?.position?.kind === name || layers.some(each => each.mixer?.position?.kind === name);
  if (slot === "scalings") return layers.some(each => each.mixer?.position?.scaling?.kind === name);
  return layers.some(each => each[SINGULAR[slot]]?.kind === name);
};

function draw() {
  const part = chosen(), slot = state.slot, wrong = refusals(state.design);
  write("refusals", wrong.map(([where, reason]) => html`<p><code>${where}</code> ${reason}.</p>`));
  $("results").classList.toggle("refused", wrong.length > 0);
  if (!wrong.length) { write("numbers", numbers(state.design)); write("curves", curves()); }
  const kind = part && kindOf(slot, part.kind);
  $("kind-name").textContent = part ? part.kind : "none";
  $("aliases").textContent = kind?.aliases.length ? `also called ${kind.aliases.join(", ")}` : "";
  write("about", part ? new Markup(DATA.about[slot][part.kind]) : html`<p>Nothing is chosen.</p>`);
  fitFormulas();
  if (!wrong.length || drawn !== `${slot} ${part?.kind}`) {
    const possible = part && !wrong.length;
    write("pictures", possible ? pictures(slot, part) : "");
    write("shapes", possible ? shapes(slot, part) : "");
    drawn = `${slot} ${part?.kind}`;
  }
  const models = part ? DATA.models.filter(model => uses(model.design, slot, part.kind)) : [];
  write("model-count", models.length ? html`${models.length} in ${byFamily(models).length} families` : "");
  write("models", models.length ? byFamily(models).map(([family, members]) => html`<p><b>${family}</b>${members.map(model => html`<button type="button" data-model="${DATA.models.indexOf(model)}">${model.name}</button>`)}</p>`) : html`<p class="small">No model on this page uses it.</p>`);
  const mistakes = part ? DATA.mistakes.filter(each => each.slot === slot && each.kinds.includes(part.kind)) : [];
  write("mistakes", mistakes.length ? html`<dl>${mistakes.map(each => html`<dt>${each.title}</dt><dd>${each.text} <span class="law">Caught by ${each.law}.</span></dd>`)}</dl>` : html`<p class="small">No mistake is recorded for this kind.</p>`);
  $("yaml").textContent = DATA.whole ? yaml(designData(state.design)) : part ? yaml({ [SINGULAR[slot]]: part }) : "";
  $("pin").textContent = state.pinned ? "Unpin" : "Pin";
  history.replaceState(null, "", "#" + encodeURIComponent(JSON.stringify(state)));
}

// A formula has no line breaks: on a phone it is set smaller, and only then scrolls.
function fitFormulas() {
  for (const box of document.querySelectorAll("#about .formula")) {
    box.style.removeProperty("--fit");
    const share = (box.clientWidth - 32) / (box.scrollWidth - 32);
    if (share < 1) box.style.setProperty("--fit", Math.max(0.6, 0.97 * share)); // spaces do not shrink with it
  }
}
addEventListener("resize", fitFormulas);

function render() { drawForm(); draw(); }

function setModel(index) {
  const { tokens, bytes } = state.design, name = layer().mixer?.kind;
  const design = copy(DATA.models[index].design), position = design.embedding?.position;
  const longest = position?.kind === "learned" ? position.length : Infinity;
  state.design = { bytes, ...design, tokens: Math.min(tokens, longest) };
  const at = state.design.layers.findIndex(each => each.mixer?.kind === name);
  state.layer = Math.max(0, at);
}

document.addEventListener("input", event => {
  const input = event.target, id = input.id ?? "";
  if (id === "position") { position = Number(input.value); draw(); $("position").focus(); return; }
  let structure = false;
  if (id.startsWith("field.")) structure = setField(id, input);
  else if (id === "design-model") { if (input.value !== "") setModel(Number(input.value)); structure = true; }
  else if (id === "design-entry") { state.layer = Number(input.value); structure = true; }
  else if (id === "layer-count") { structure = (layer().count < 2) !== (Number(input.value) < 2); layer().count = Number(input.value); }
  else if (id === "layer-shared") { if (input.checked) layer().shared = true; else delete layer().shared; structure = true; }
  else if (id.startsWith("design-")) state.design[id.slice(7)] = Number(input.value);
  else return;
  if (structure) render(); else draw();
});

document.addEventListener("click", event => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.id.startsWith("tab-")) state.slot = button.id.slice(4);
  else if (button.dataset.kind !== undefined) choose(state.slot, button.dataset.kind ? another(state.slot, button.dataset.kind, chosen()) : null);
  else if (button.dataset.model !== undefined) {
    const name = chosen().kind, slot = state.slot;
    setModel(Number(button.dataset.model));
    const at = state.design.layers.findIndex(each => (slot === "positions" ? each.mixer?.position : slot === "scalings" ? each.mixer?.position?.scaling : each[SINGULAR[slot]])?.kind === name);
    if (at >= 0) state.layer = at;
  } else if (button.id === "pin") state.pinned = state.pinned ? undefined : copy(state.design);
  else if (button.id === "copy-yaml" || button.id === "copy-link") {
    navigator.clipboard?.writeText(button.id === "copy-yaml" ? $("yaml").textContent : location.href);
    $("copied").textContent = button.id === "copy-yaml" ? "YAML copied." : "Link copied.";
    return;
  } else if (button.id === "again") state = copy(DATA.start);
  else return;
  render();
});

$("choices").addEventListener("submit", event => event.preventDefault());
addEventListener("hashchange", () => { state = stateFrom(location.hash.slice(1)); render(); });
if (matchMedia("(max-width: 820px)").matches) for (const id of ["options", "surroundings"]) $(id).open = false;
render();
