// The pictures of feed-forwards, residual blocks and norms.
"use strict";
const box = (x, y, w, h, words, stroke = "var(--ink)") => [rect(x, y, w, h, "var(--tint)", html`rx="7" stroke="${stroke}" stroke-width="1.5"`), text(x + w / 2, y + h / 2 + 4.5, words, html`text-anchor="middle"`)];
const plus = (x, y) => [html`<circle cx="${x}" cy="${y}" r="9" fill="var(--card)" stroke="var(--ink)" stroke-width="1.5"/>`, line(x - 4.5, y, x + 4.5, y, "var(--ink)", html`stroke-width="1.6"`), line(x, y - 4.5, x, y + 4.5, "var(--ink)", html`stroke-width="1.6"`)];
const wire = (d, stroke = "var(--ink)") => path(d, stroke, html`stroke-width="1.6"`);

function feedforwardPicture(part, v) {
  if (part.kind === "moe") return routesPicture(part, v);
  const gated = part.kind === "gated", largest = Math.max(v.width, v.hidden), tall = value => Math.max(14, 128 * value / largest), middle = 90;
  const column = (x, size, fill, words) => [rect(x, middle - tall(size) / 2, 16, tall(size), fill, html`rx="5"`), text(x + 8, middle + tall(size) / 2 + 16, words, html`text-anchor="middle" class="tick"`)];
  const fan = (x1, s1, x2, s2, fill) => html`<path d="M${x1} ${middle - tall(s1) / 2}L${x2} ${middle - tall(s2) / 2}V${middle + tall(s2) / 2}L${x1} ${middle + tall(s1) / 2}Z" fill="${fill}" opacity=".16"/>`;
  const name = part.activation ?? (gated ? "silu" : "gelu"), right = gated ? 300 : 230;
  const body = [fan(46, v.width, 150, v.hidden, SERIES[0]), column(30, v.width, "var(--series-0)", v.width), column(150, v.hidden, SERIES[0], v.hidden)];
  if (gated) body.push(column(208, v.hidden, SERIES[1], ""), text(187, middle + 5, "⊙", html`text-anchor="middle" class="sign"`), fan(224, v.hidden, right + 30, v.width, SERIES[2]));
  else body.push(fan(166, v.hidden, right + 30, v.width, SERIES[2]));
  body.push(column(right + 30, v.width, "var(--series-0)", v.width), text(98, 14, gated ? "gate, up" : "up", html`text-anchor="middle"`), text(right - 20, 14, "down", html`text-anchor="middle"`));
  return figure(svg(right + 70, 190, "Widths of the feed-forward", body), (gated ? `down(${name}(gate(x)) ⊙ up(x))` : `down(${name}(up(x)))`) + `: every token is projected to ${amount(v.hidden / v.width)} times the width, and back.`);
}

// The experts that a token of the picture takes: the best scores, with groups only in the best groups.
function routesOf(token, part) {
  const experts = part.experts, scores = Array.from({ length: experts }, (_, e) => noise(token * 53 + e * 17 + 3));
  let allowed = new Set(scores.keys());
  if (part.groups && part.top_groups && part.groups > 1) {
    const size = experts / part.groups, take = part.routing === "softmax_group_max" ? 1 : 2;
    const best = Array.from({ length: part.groups }, (_, g) => [scores.slice(g * size, (g + 1) * size).sort((a, b) => b - a).slice(0, take).reduce((a, b) => a + b, 0), g]);
    const groups = best.sort((a, b) => b[0] - a[0]).slice(0, part.top_groups).map(each => each[1]);
    allowed = new Set([...scores.keys()].filter(e => groups.includes(Math.floor(e / size))));
  }
  return [...allowed].sort((a, b) => scores[b] - scores[a]).slice(0, part.top_k).sort((a, b) => a - b);
}

function routesPicture(part, v) {
  const tokens = 8, drawn = Math.min(part.experts, 32), few = { ...part, experts: drawn };
  if (drawn < part.experts) { few.top_k = Math.min(part.top_k, 8); if (part.groups) { few.groups = Math.min(part.groups, 8); few.top_groups = Math.min(part.top_groups ?? 1, few.groups); } }
  const space = Math.max(9, 190 / drawn), height = Math.max(230, drawn * space + 40), expertY = e => 30 + (height - 60) / drawn * (e + 0.5), tokenY = t => 30 + (height - 60) / tokens * (t + 0.5);
  const loads = Array(drawn).fill(0);
  const lines = [];
  for (let t = 0; t < tokens; t++) for (const e of routesOf(t, few)) {
    loads[e]++;
    lines.push(path(`M44 ${round(tokenY(t))}C130 ${round(tokenY(t))} 140 ${round(expertY(e))} 222 ${round(expertY(e))}`, color(t), html`stroke-width="1.8" opacity=".8"`));
  }
  const body = [lines, times(tokens, t => html`<circle cx="36" cy="${round(tokenY(t))}" r="8" fill="${color(t)}"/>`)];
  body.push(times(drawn, e => [rect(222, expertY(e) - space * 0.36, 34, space * 0.72, loads[e] ? "var(--series-0)" : "var(--unseen)", html`rx="3"`), rect(264, expertY(e) - space * 0.3, loads[e] * 13, space * 0.6, SERIES[2], html`rx="2"`)]));
  if (few.groups > 1) body.push(times(few.groups, g => rect(218, expertY(g * drawn / few.groups) - space / 2, 42, space * drawn / few.groups, "none", html`stroke="var(--soft)" stroke-dasharray="3 3" rx="4"`)));
  body.push(text(36, 16, "tokens", html`text-anchor="middle"`), text(239, 16, "experts", html`text-anchor="middle"`), text(264, height - 6, "tokens of each", html`class="tick"`));
  if (part.shared) { body.push(rect(150, height - 24, 60, 20, SERIES[4], html`rx="5"`), text(180, height - 9, "shared", html`text-anchor="middle" class="tick" style="fill:#1d2129"`), path(`M44 ${round(tokenY(tokens - 1))}Q70 ${height - 14} 150 ${height - 14}`, SERIES[4], html`stroke-width="2"`)); }
  const words = `Each token goes to ${part.top_k} of ${part.experts} experts${part.groups ? `, from the best ${part.top_groups} of ${part.groups} groups` : ""}${part.shared ? ", and to the shared expert" : ""}. The scores here are arbitrary; real loads can be as uneven, which is what balancing is for.${drawn < part.experts ? ` ${drawn} experts are drawn.` : ""}`;
  return figure(svg(380, height, "Routes of tokens to experts", body), words);
}

function residualPicture(part) {
  const kind = part.kind, stream = 120, up = 42, branches = ["mixer", "feed-forward"];
  const before = ["pre_norm", "sandwich"].includes(kind), after = ["sandwich", "reordered"].includes(kind), onStream = ["post_norm", "deep_norm", "residual_dual"].includes(kind);
  if (kind === "parallel") return parallelPicture(part);
  if (kind === "hyper_connections") return streamsPicture(part);
  if (kind === "attention_residuals") return sourcesPicture(part);
  if (!before && !after && !onStream) return "";  // a user-defined kind
  const body = [];
  let x = 30, end = 0;
  const dual = kind === "residual_dual", low = 180;
  for (const name of branches) {
    const start = x + 14, first = start + 30;
    let at = first;
    body.push(wire(`M${start} ${stream}V${up}H${first}`));
    if (before) { body.push(box(at, up - 15, 30, 30, "N", SERIES[1]), wire(`M${at + 30} ${up}h12`)); at += 42; }
    body.push(box(at, up - 18, 98, 36, name, SERIES[0])); at += 98;
    if (after) { body.push(wire(`M${at} ${up}h12`), box(at + 12, up - 15, 30, 30, "N", SERIES[1])); at += 42; }
    const join = at + 24;
    body.push(wire(`M${at} ${up}H${join}V${stream - 9}`), wire(`M${x} ${stream}H${join - 9}`), plus(join, stream));
    if (kind === "deep_norm") body.push(rect((start + join) / 2 - 12, stream - 12, 24, 24, "var(--card)", html`rx="5" stroke="var(--series-2)"`), text((start + join) / 2, stream + 5, "α", html`text-anchor="middle"`));
    if (dual) body.push(wire(`M${join - 14} ${up}V${low - 9}`, SERIES[2]), wire(`M${x} ${low}H${join - 23}`, SERIES[2]), plus(join - 14, low));
    x = join + 9;
    if (dual) end = join - 5;
    if (onStream) { body.push(wire(`M${x} ${stream}h10`), box(x + 10, stream - 15, 30, 30, "N", SERIES[1])); x += 40; }
    if (dual) { body.push(wire(`M${end} ${low}H${x}`, SERIES[2])); }
  }
  body.push(wire(`M${x} ${stream}h22`), text(x + 30, stream + 5, "…")); x += 52;
  const final = !["post_norm", "deep_norm"].includes(kind);
  if (dual) body.push(wire(`M${x - 52} ${low}H${x + 6}`, SERIES[2]), box(x + 6, low - 15, 30, 30, "N", SERIES[1]), wire(`M${x + 36} ${low}H${x + 52}V${stream + 9}`, SERIES[2]), wire(`M${x} ${stream}H${x + 43}`), plus(x + 52, stream), wire(`M${x + 61} ${stream}h16`), text(30, low + 20, "a second stream that only adds up", html`class="tick"`));
  else if (final) body.push(wire(`M${x} ${stream}h10`), box(x + 10, stream - 15, 30, 30, "N", SERIES[1]), wire(`M${x + 40} ${stream}h18`));
  else body.push(wire(`M${x} ${stream}h18`));
  const words = { pre_norm: "Each branch reads a normalized copy; the stream itself is normalized only at the end.", post_norm: "The sum is normalized after each branch, so the stream is normalized at every step.", sandwich: "A norm before and one after each branch.", reordered: "The norm follows the branch, before its output is added.", deep_norm: "As post-norm, with the stream multiplied by α, the fourth root of 2 · layers, before the sum.", residual_dual: "The upper stream is post-norm; the lower one only accumulates, and is normalized once at the end." }[kind] ?? "";
  return figure(svg(x + 84, dual ? 210 : 150, `The wiring of ${kind}`, html`<g class="wiring">${body}</g>`), `${words} N is a norm, from left to right one layer.`);
}

function parallelPicture(part) {
  const two = part.norms === 2, stream = 134;
  const body = [wire(`M20 ${stream}H280`), wire("M40 134V60H56")];
  if (two) body.push(wire("M40 60V34H56"), wire("M40 60V88H56"), box(56, 19, 30, 30, "N", SERIES[1]), box(56, 73, 30, 30, "N", SERIES[1]), wire("M86 34H110M86 88H110"));
  else body.push(box(56, 45, 30, 30, "N", SERIES[1]), wire("M86 60H98M98 34V88M98 34H110M98 88H110"));
  body.push(box(110, 16, 110, 36, "mixer", SERIES[0]), box(110, 70, 110, 36, "feed-forward", SERIES[0]), wire(`M220 34H289V${stream - 9}M220 88H289`), plus(289, stream), wire(`M298 ${stream}h24`), text(330, stream + 5, "…"), wire(`M352 ${stream}h10`), box(362, stream - 15, 30, 30, "N", SERIES[1]), wire(`M392 ${stream}h18`));
  return figure(svg(420, 160, "The wiring of parallel", html`<g class="wiring">${body}</g>`), `Both branches read the same stream and are added together: ${two ? "each with its own norm (GPT-NeoX)" : "one norm for both (GPT-J, PaLM)"}.`);
}

function streamsPicture(part) {
  const n = part.streams ?? 4, mixed = part.mixing !== false, gated = Boolean(part.gate_rank), shown = Math.min(n, 8), y = index => 100 + index * Math.min(16, 80 / shown), last = y(shown - 1);
  const body = [];
  for (const [at, name] of [[20, "mixer"], [240, "feed-forward"]]) {
    body.push(times(shown, s => line(at, y(s), at + 220, y(s), color(s), html`stroke-width="2"`)));
    body.push(wire(`M${at + 30} ${last}V42H${at + 44}`), box(at + 20, 62, 20, 22, "R", SERIES[1]), gated ? wire(`M${at + 44} 42h24`) : box(at + 44, 27, 24, 30, "N", SERIES[1]), wire(`M${at + 68} 42h10`), box(at + 78, 24, 94, 36, name, SERIES[0]), wire(`M${at + 172} 42H${at + 196}V${last}`), box(at + 184, 62, 24, 22, "W", SERIES[1]));
    if (mixed) body.push(box(at + 94, y(0) - 8, 44, last - y(0) + 16, "M", SERIES[2]));
    body.push(times(shown, s => html`<circle cx="${at + 196}" cy="${round(y(s))}" r="4.5" fill="var(--card)" stroke="var(--ink)" stroke-width="1.4"/>`));
  }
  return figure(svg(480, last + 26, "The wiring of hyper-connections", html`<g class="wiring">${body}</g>`), `${n} streams. R ${gated ? "gates their norms, whose mean the branch reads" : "reads them as one"}, W writes the branch’s output to each${mixed ? ", M mixes them (rows and columns sum to 1)" : ""}. All are computed from the token.`);
}

function sourcesPicture(part) {
  const y = index => 24 + index * 52, body = [], end = 516;
  const lane = (index, x, name) => body.push(wire(`M${x} ${y(index)}H${end}`, color(index)), text(x - 6, y(index) + 5, name, html`text-anchor="end"`));
  lane(0, 40, "v₀");
  [["mixer", 64], ["feed-forward", 250]].forEach(([name, x], index) => {
    const row = y(index + 1), at = index ? x + 36 : x;
    body.push(wire(`M${x} ${y(0)}V${row}H${at + 14}`));
    if (index) body.push(html`<circle cx="${x}" cy="${y(1)}" r="4.5" fill="var(--card)" stroke="var(--ink)" stroke-width="1.4"/>`, box(x + 14, row - 15, 28, 30, "α", SERIES[2]), wire(`M${x + 42} ${row}h8`));
    body.push(box(at + 14, row - 15, 28, 30, "N", SERIES[1]), wire(`M${at + 42} ${row}h8`), box(at + 50, row - 18, 96, 36, name, SERIES[0]));
    lane(index + 1, at + 172, index ? "v₂" : "v₁");
  });
  const size = part.block_size, blocks = size ? ` The outputs of ${size} ${size === 1 ? "layer are" : "layers are"} summed into one source.` : "";
  return figure(svg(end + 20, y(2) + 34, "The wiring of attention residuals", html`<g class="wiring">${body}</g>`), `Every output stays a separate source. α is a softmax over all earlier sources of a token, with a learned query for each branch.${blocks}`);
}

function normedValues(part, x) {
  const mean = part.kind === "layer" ? x.reduce((a, b) => a + b, 0) / x.length : 0, eps = part.eps ?? (part.kind === "layer" ? 1e-5 : 1e-6);
  const size = Math.sqrt(x.reduce((sum, value) => sum + (value - mean) ** 2, 0) / x.length + eps);
  return x.map(value => (value - mean) / size);
}

function normPicture(part) {
  const x = Array.from({ length: 14 }, (_, index) => noise(index + 2) * 3.4 - 0.7), y = normedValues(part, x);
  const bars = (values, left, fill) => [values.map((value, index) => rect(left + index * 12, 82 - Math.max(0, value) * 22, 9, Math.max(1, Math.abs(value) * 22), fill, html`rx="2"`)), line(left - 4, 82, left + 170, 82, "var(--line)")];
  const mean = x.reduce((a, b) => a + b, 0) / x.length;
  const body = [bars(x, 20, SERIES[0]), bars(y, 220, SERIES[2]), text(100, 150, "x", html`text-anchor="middle"`), text(305, 150, part.kind === "layer" ? "(x − mean) / std" : "x / rms", html`text-anchor="middle"`)];
  body.push(line(16, 82 - mean * 22, 190, 82 - mean * 22, SERIES[1], html`stroke-dasharray="4 3"`), text(194, 82 - mean * 22 + 4, "mean", html`class="tick"`));
  return figure(svg(410, 160, "A vector before and after the norm", body), part.kind === "layer" ? "The mean (orange) is subtracted, then all is divided by the standard deviation." : "All is divided by the root of the mean square. The mean (orange) stays in it.");
}
