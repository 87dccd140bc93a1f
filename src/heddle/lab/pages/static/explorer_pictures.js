// The pictures: what a part does, drawn from its fields. Tests compare the numbers in them with heddle's own.
"use strict";
const SERIES = [1, 2, 3, 4, 5, 6].map(number => `var(--series-${number})`);
const color = index => SERIES[index % SERIES.length];
const round = value => Math.round(value * 100) / 100;
const SHOWN = 16;
const MOST_DRAWN = 4096;  // rectangles in a row
const HUGE = 1e30;  // frequencies and waves are drawn up to here

// What may be written into the page: a template whose values are escaped, unless they are such templates themselves.
class Markup {
  constructor(text) { this.text = text; }
}
const SIGNS = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const markup = value => Array.isArray(value) ? value.map(markup).join("") : value instanceof Markup ? value.text : String(value).replace(/[&<>"']/g, sign => SIGNS[sign]);
const html = (parts, ...values) => new Markup(parts.map((part, index) => (index ? markup(values[index - 1]) : "") + part).join(""));
const write = (id, value) => { $(id).innerHTML = markup(value); };

function svg(width, height, title, body) {
  return html`<svg viewBox="0 0 ${width} ${height}" style="max-width:${width * 1.25}px" role="img" aria-label="${title}"><title>${title}</title>${body}</svg>`;
}
const rect = (x, y, w, h, fill, more = "") => html`<rect x="${round(x)}" y="${round(y)}" width="${round(w)}" height="${round(h)}" fill="${fill}" ${more}/>`;
const line = (x1, y1, x2, y2, stroke, more = "") => html`<line x1="${round(x1)}" y1="${round(y1)}" x2="${round(x2)}" y2="${round(y2)}" stroke="${stroke}" ${more}/>`;
const text = (x, y, words, more = "") => html`<text x="${round(x)}" y="${round(y)}" ${more}>${words}</text>`;
const path = (d, stroke, more = "") => html`<path d="${d}" fill="none" stroke="${stroke}" ${more}/>`;
const figure = (picture, caption) => html`<figure>${picture}<figcaption>${caption}</figcaption></figure>`;
const times = (count, make) => Array.from({ length: count }, (_, index) => make(index));
const noise = index => { const x = Math.sin(index * 127.1 + 11.7) * 43758.5453; return x - Math.floor(x); };
const amount = value => value.toLocaleString("en-US", { maximumFractionDigits: 2 });

// ---- mixers ----
const isRecurrent = part => kindOf("mixers", part.kind).recurrent;
const GATED = ["gated_delta", "kda", "mamba2", "rwkv7"]; // others are drawn without fading

// Whether query i sees key j.
function visible(part, i, j, window = part.window ?? Infinity) {
  if (part.kind === "cross_attention") return true;
  if (part.kind === "short_conv") return j <= i && i - j < (part.conv_kernel ?? 3);
  return part.causal === false ? Math.abs(i - j) <= window : j <= i && i - j < window;
}

const alibiSlope = (head, heads) => 2 ** (-8 * (head + 1) / heads);
const retentionDecay = head => 1 - 2 ** (-5 - head);

// How dark a visible pair is drawn: a fixed decay where there is one.
function shade(part, i, j, heads) {
  const distance = Math.abs(i - j);
  if (part.position?.kind === "alibi") return Math.exp(-alibiSlope(Math.min(2, heads - 1), heads) * distance);
  if (part.kind === "retention") return (Array.isArray(part.decay) && part.decay[0] || retentionDecay(0)) ** distance;
  if (GATED.includes(part.kind)) {
    let kept = 1;
    for (let t = j + 1; t <= i; t++) kept *= 0.72 + 0.28 * noise(t);
    return kept;
  }
  return 1;
}

function maskPicture(part, v) {
  const cell = 15, left = 52, top = 40, heads = v.heads || 1;
  const given = part.window, small = given !== undefined && given !== null && given >= SHOWN;
  const window = small ? 5 : given ?? Infinity;
  const body = [];
  for (let i = 0; i < SHOWN; i++)
    for (let j = 0; j < SHOWN; j++) {
      const seen = visible(part, i, j, window);
      const opacity = seen ? Math.max(0.08, shade(part, i, j, heads)) : 1;
      body.push(rect(left + j * cell, top + i * cell, cell - 1.5, cell - 1.5, seen ? SERIES[0] : "var(--unseen)", html`rx="2.5" opacity="${round(opacity)}"`));
    }
  const keys = part.kind === "cross_attention" ? "tokens of the encoder output" : "keys, by position";
  body.push(text(left + SHOWN * cell / 2, 14, keys, html`text-anchor="middle"`));
  body.push(html`<text transform="translate(14 ${top + SHOWN * cell / 2}) rotate(-90)" text-anchor="middle">queries, by position</text>`);
  for (const at of [0, 5, 10, 15]) {
    body.push(text(left + at * cell + 7, 33, at, html`text-anchor="middle" class="tick"`));
    body.push(text(left - 6, top + at * cell + 11, at, html`text-anchor="end" class="tick"`));
  }
  let words = `A row is a token; blue cells are the ${part.kind === "cross_attention" ? "tokens of the encoder output" : "tokens"} that it reads.`;
  if (small) words += ` The window of ${amount(given)} tokens is drawn as one of 5.`;
  else if (Number.isFinite(window)) words += part.causal === false ? ` The window reaches ${window} to each side.` : ` The window holds ${window} tokens, including the query itself.`;
  if (part.position?.kind === "alibi") words += " Lighter cells: the distance lowers the score (one head’s slope).";
  if (part.kind === "retention") words += ` Each step multiplies what came before by γ = ${amount(retentionDecay(0))}… in the first head.`;
  if (GATED.includes(part.kind)) words += " Older tokens fade by a factor that each token computes for itself (here: arbitrary factors).";
  if (part.kind === "linear_attention") words += " All are read through one sum, not pair by pair.";
  return figure(svg(left + SHOWN * cell + 8, top + SHOWN * cell + 6, "Which tokens each token reads", body), words);
}

function headsPicture(part, v) {
  const heads = v.heads, groups = part.kind === "latent_attention" ? 1 : v.kv_heads || v.key_heads || v.groups || heads;
  const drawn = Math.min(heads, 32), per = heads / groups, space = Math.min(30, 400 / drawn), left = 12;
  const shownGroups = Math.ceil(drawn / per), width = Math.max(250, left * 2 + drawn * space);
  const queryX = head => (width - drawn * space) / 2 + (head + 0.5) * space;
  const keyX = group => (queryX(group * per) + queryX(Math.min(drawn - 1, (group + 1) * per - 1))) / 2;
  const size = Math.min(18, space * 0.72);
  const body = [times(drawn, head => line(queryX(head), 44, keyX(Math.floor(head / per)), 104, color(Math.floor(head / per)), html`stroke-width="1.6" opacity=".75"`))];
  body.push(times(drawn, head => html`<circle cx="${round(queryX(head))}" cy="38" r="${round(size / 2)}" fill="${color(Math.floor(head / per))}"/>`));
  body.push(times(shownGroups, group => rect(keyX(group) - size * 0.6, 98, size * 1.2, size * 1.2, color(group), html`rx="3"`)));
  body.push(text(width / 2, 16, `${heads} query head${heads > 1 ? "s" : ""}`, html`text-anchor="middle"`));
  const latent = part.kind === "latent_attention";
  body.push(text(width / 2, 144, latent ? `1 latent of ${v.kv_rank} for all heads` : `${groups} key and value head${groups > 1 ? "s" : ""}`, html`text-anchor="middle"`));
  const name = latent ? "All heads expand their keys and values from one latent." : per === 1
    ? "Every query head has its own keys and values (multi-head attention)." : groups === 1
      ? "All query heads share one key and value head (multi-query attention)." : `${per} query heads share a key and value head: head h reads ⌊h / ${per}⌋.`;
  return figure(svg(width, 154, "Which query heads share keys and values", body), name + (drawn < heads ? ` The first ${drawn} are drawn.` : ""));
}

function cachePicture(part, v) {
  if (isRecurrent(part) || v.is_normalization_double_softmax) return matrixPicture(part, v);
  if (part.causal === false) return "";
  if (part.window && part.window < v.tokens) return ringPicture(part, v);
  if (!v.kv_heads && !v.kv_rank) return "";
  const latent = part.kind === "latent_attention", own = latent ? v.kv_rank + v.rope_dim
    : v.kv_heads * ((part.kind === "differential_attention" ? 2 : 1) * v.head_dim + v.value_dim);
  const full = v.heads * (latent ? v.nope_dim + v.rope_dim + v.value_dim : (part.kind === "differential_attention" ? 2 : 1) * v.head_dim + v.value_dim);
  const height = 130, bar = Math.max(2, height * Math.min(1, own / full)), top = 26;
  const body = [times(SHOWN, at => [rect(20 + at * 22, top, 16, height, "none", html`stroke="var(--line)" stroke-dasharray="3 3" rx="3"`), rect(20 + at * 22, top + height - bar, 16, bar, latent ? SERIES[1] : SERIES[2], html`rx="3"`)])];
  body.push(text(20, 16, "elements of each token in the cache"));
  body.push(text(196, top + height + 20, "tokens →", html`text-anchor="middle"`));
  const share = own < full ? ` A separate head for each query head would take ${amount(full)} (dashed): ${amount(full / own)} times as much.` : "";
  return figure(svg(392, top + height + 28, "What the cache holds", body), `Each token adds ${amount(own)} elements in this layer${latent ? `: a latent of ${v.kv_rank} and ${v.rope_dim} rotated dims` : ""}.${share}`);
}

function ringPicture(part, v) {
  const real = part.window, slots = Math.min(real, 12), last = slots + 5, center = 120, radius = 84;
  const body = [];
  for (let slot = 0; slot < slots; slot++) {
    const newest = last - ((last - slot) % slots), angle = (start) => (slot + start) / slots * 2 * Math.PI - Math.PI / 2;
    const at = (r, a) => `${round(center + r * Math.cos(a))} ${round(center + r * Math.sin(a))}`;
    const [a, b] = [angle(0.03), angle(0.97)], wide = slots === 1 ? 1 : 0;
    const age = last - newest, d = `M${at(radius + 16, a)}A${radius + 16} ${radius + 16} 0 ${wide} 1 ${at(radius + 16, b)}L${at(radius - 20, b)}A${radius - 20} ${radius - 20} 0 ${wide} 0 ${at(radius - 20, a)}Z`;
    body.push(html`<path d="${d}" fill="${age ? SERIES[2] : SERIES[1]}" opacity="${round(age ? 1 - 0.65 * age / slots : 1)}"/>`);
    const m = angle(0.5);
    body.push(text(center + (radius + 28) * Math.cos(m), center + (radius + 28) * Math.sin(m) + 4, newest, html`text-anchor="middle" class="tick"`));
  }
  body.push(text(center, center - 4, "token t", html`text-anchor="middle"`), text(center, center + 14, `in slot t mod ${real === slots ? slots : "w"}`, html`text-anchor="middle"`));
  const scaled = real > slots ? ` The window of ${amount(real)} is drawn as one of ${slots}.` : "";
  return figure(svg(240, 240, "The ring of a window", body), `The cache is a ring of ${amount(real)} slots: token ${last} (orange) has just taken the place of the oldest. It never grows.${scaled}`);
}

function matrixPicture(part, v) {
  if (!v.value_dim && !v.state_size) return "";
  const rows = part.kind === "mamba2" ? v.state_size : v.head_dim * (v.is_feature_map_learned ? 2 : 1);
  const columns = part.kind === "mamba2" ? v.head_dim : part.kind === "linear_attention" ? v.value_dim + 1 : v.value_dim;
  const largest = Math.max(rows, columns), drawn = Math.min(largest, 18), nr = Math.max(1, Math.round(rows / largest * drawn)), nc = Math.max(1, Math.round(columns / largest * drawn));
  const cell = 160 / drawn, sheets = Math.min(3, part.kind === "cross_attention" ? v.kv_heads : v.heads);
  const body = [];
  for (let sheet = sheets - 1; sheet >= 0; sheet--) {
    const x = 46 + sheet * 14, y = 30 + sheet * 12;
    body.push(rect(x - 2, y - 2, nc * cell + 4, nr * cell + 4, "var(--card)", html`stroke="var(--line)" rx="4"`));
    if (!sheet) for (let i = 0; i < nr; i++) for (let j = 0; j < nc; j++)
      body.push(rect(x + j * cell, y + i * cell, cell - 0.8, cell - 0.8, SERIES[4], html`opacity="${round(0.15 + 0.85 * noise(i * 31 + j * 7))}"`));
  }
  body.push(text(46, 18, `${columns} ${part.kind === "linear_attention" ? "(values, and the sum z)" : "values"} →`));
  body.push(html`<text transform="translate(34 ${30 + nr * cell / 2}) rotate(-90)" text-anchor="middle">${rows} keys</text>`);
  const count = part.kind === "cross_attention" ? v.kv_heads : v.heads;
  const extra = v.conv_kernel ? ` Beside it are the last ${v.conv_kernel - 1} inputs of the convolution.` : "";
  if (part.causal === false) return "";
  return figure(svg(Math.max(250, 60 + nc * cell + 40), 44 + nr * cell + sheets * 12, "The state of a recurrence", body),
    `The state is one matrix of ${rows} × ${columns} for each of ${count} head${count > 1 ? "s" : ""}, after any number of tokens.${extra}`);
}

// ---- positions ----
const pairFrequencies = (dims, base) => Array.from({ length: dims / 2 }, (_, index) => Math.min(HUGE, base ** (-2 * index / dims)));

function positionPictures(part, v, position) {
  const heads = v.heads || 8, dims = part.rotary_dim ?? v.rope_dim ?? v.head_dim ?? 64;
  if (part.kind === "rope" || part.kind === "axial_rope") return rotationPictures(part, dims || 64, v, position);
  if (part.kind === "alibi") return alibiPicture(heads);
  if (part.kind === "relative_bias") return bucketPicture(part);
  return ADDITIVE.includes(part.kind) ? tablePicture(part) : "";
}

const tooMany = html`<p class="small">There are too many to draw.</p>`;

function rotationPictures(part, dims, v, position) {
  if (dims > MOST_DRAWN) return tooMany;
  const axial = part.kind === "axial_rope", all = pairFrequencies(axial ? dims / 2 : dims, part.base ?? 10000);
  const count = Math.min(6, all.length), picked = Array.from({ length: count }, (_, index) => count === 1 ? 0 : Math.round(index * (all.length - 1) / (count - 1)));
  const body = [];
  picked.forEach((pair, column) => {
    const cx = 60 + column % 3 * 116, cy = 66 + Math.floor(column / 3) * 134, radius = 40;
    body.push(html`<circle cx="${cx}" cy="${cy}" r="${radius}" fill="none" stroke="var(--line)"/>`);
    for (let m = 0; m <= position; m++) {
      if (position - m > 24) continue;
      const angle = m * all[pair], tip = m === position;
      body.push(line(cx, cy, cx + radius * Math.cos(angle), cy - radius * Math.sin(angle), tip ? SERIES[1] : SERIES[0], html`stroke-width="${tip ? 3.2 : 1.2}" stroke-linecap="round" opacity="${tip ? 1 : round(0.1 + 0.5 * (1 - (position - m) / 25))}"`));
    }
    body.push(text(cx, cy - 50, `pair ${pair}`, html`text-anchor="middle" class="tick"`));
    body.push(text(cx, cy + 58, `θ = ${Number(all[pair].toPrecision(2))}`, html`text-anchor="middle" class="tick"`));
  });
  const layout = part.layout === "interleaved" ? `pair i is dims 2i and 2i + 1` : `pair i is dims i and i + ${dims / (axial ? 4 : 2)}`;
  const slider = html`<label class="slider">position <input type="range" id="position" min="0" max="64" value="${position}"> <output>${position}</output></label>`;
  const words = `Pair i of a head turns by position · θᵢ, θᵢ = base^(−2i/${axial ? dims / 2 : dims}); ${layout}.${axial ? " One half of the pairs turns by x, the other by y; a text has x = y = position." : ""} Orange: position ${position}; blue: the ones before. Scores depend on differences only.${part.scaling || part.inv_freq ? " Drawn without the design’s own scaling or frequencies." : ""}`;
  return [figure([svg(352, count > 3 ? 264 : 130, "Pairs of dims turned by their positions", body), slider], words), wavelengthPicture(all, v)];
}

function wavelengthPicture(frequencies, v) {
  const length = v.tokens || 4096, waves = frequencies.map(theta => Math.min(HUGE, 2 * Math.PI / theta));
  const most = Math.log10(Math.max(...waves.filter(wave => wave < HUGE), length) * 4);  // pairs that stand still reach the top
  const x = index => 46 + (index + 0.5) * 340 / waves.length, y = value => 140 - Math.min(1, Math.log10(Math.max(1, value)) / most) * 118;
  const body = [waves.map((wave, index) => rect(x(index) - 170 / waves.length * 0.8, y(wave), 340 / waves.length * 0.8, 140 - y(wave), wave > length ? SERIES[1] : SERIES[0], html`rx="1.5"`))];
  body.push(line(44, y(length), 390, y(length), "var(--ink)", html`stroke-dasharray="4 4"`), text(50, y(length) - 5, `context ${amount(length)}`, html`class="tick"`));
  for (let power = 0; power <= most; power += most > 5 ? 2 : 1) body.push(text(40, y(10 ** power) + 4, short(10 ** power), html`text-anchor="end" class="tick"`));
  body.push(text(216, 160, "pairs, fast to slow", html`text-anchor="middle"`), text(46, 12, "tokens in one full turn"));
  const still = waves.filter(wave => wave === HUGE).length, slow = waves.filter(wave => wave > length).length - still;
  const words = `${slow} of ${waves.length} pairs (orange) never complete a turn within the context. On longer sequences these reach angles never seen in training.`;
  return figure(svg(400, 168, "How many tokens each pair takes for a full turn", body), still ? `${words} ${still} stand still.` : words);
}

function alibiPicture(heads) {
  const shown = Math.min(heads, 8), picked = Array.from({ length: shown }, (_, index) => Math.floor(index * heads / shown));
  const body = [line(46, 14, 46, 140, "var(--line)"), line(46, 14, 390, 14, "var(--line)")];
  picked.forEach((head, index) => {
    const slope = alibiSlope(head, heads), end = Math.min(64, 16 / slope);
    body.push(line(46, 14, 46 + end * 5.3, 14 + slope * end * 7.8, color(index), html`stroke-width="2.2"`));
  });
  body.push(text(40, 18, "0", html`text-anchor="end" class="tick"`), text(40, 142, "−16", html`text-anchor="end" class="tick"`), text(390, 156, "64 tokens back", html`text-anchor="end" class="tick"`), text(46, 160, "added to the score"));
  return figure(svg(400, 168, "Score biases by distance", body), `Each of ${heads} heads lowers scores by its own slope, from ${amount(alibiSlope(0, heads))} to ${Number(alibiSlope(heads - 1, heads).toPrecision(2))} per token of distance. Nothing is learned.`);
}

// The bucket of a key `distance` tokens back, of a causal mixer.
function bucketOf(distance, buckets, most) {
  const exact = Math.floor(buckets / 2);
  if (distance < exact) return distance;
  const step = Math.fround(Math.fround(Math.log(Math.fround(Math.min(distance, most) / exact))) / Math.log(most / exact) * (buckets - exact));
  return Math.min(buckets - 1, exact + Math.floor(step));
}

function bucketPicture(part) {
  const buckets = part.buckets ?? 32, most = part.max_distance ?? 128, reach = Math.ceil(most * 1.15);
  if (reach > MOST_DRAWN) return tooMany;
  const body = [];
  for (let d = 0; d < reach; d++)
    body.push(rect(46 + d * 344 / reach, 136 - bucketOf(d, buckets, most) / Math.max(1, buckets - 1) * 112, 344 / reach + 0.3, 3.5, color(bucketOf(d, buckets, most))));
  body.push(text(40, 140, "0", html`text-anchor="end" class="tick"`), text(40, 30, buckets - 1, html`text-anchor="end" class="tick"`), text(46, 14, "bucket"), text(390, 160, `${reach} tokens back`, html`text-anchor="end" class="tick"`));
  return figure(svg(400, 168, "Which bucket a distance falls into", body), `Near distances have one bucket each; farther ones share buckets of logarithmic width; from ${most} on all share the last. Each head learns one number for each of ${buckets} buckets.`);
}

const sinusoid = (position, dim, dims) => { const angle = position / 10000 ** (2 * Math.floor(dim / 2) / dims); return dim % 2 ? Math.cos(angle) : Math.sin(angle); };

function tablePicture(part) {
  const body = [];
  for (let p = 0; p < 32; p++) for (let d = 0; d < 48; d++) {
    const value = part.kind === "learned" ? noise(p * 97 + d) * 1.6 - 0.8 : sinusoid(p, d, 48);
    body.push(rect(30 + d * 7.5, 18 + p * 4.6, 7.1, 4.2, value < 0 ? SERIES[1] : SERIES[0], html`opacity="${round(Math.abs(value))}"`));
  }
  body.push(text(30, 12, "dims of the embedding →"), html`<text transform="translate(20 92) rotate(-90)" text-anchor="middle">positions</text>`);
  const words = part.kind === "learned" ? `A table of ${amount(part.length)} learned rows (here: arbitrary numbers). A later position has no row, and is rejected.`
    : "Sines and cosines of falling frequencies, 48 dims drawn. Row p + k is a fixed rotation of row p.";
  return figure(svg(400, 172, "Vectors added to the embedding", body), words);
}
