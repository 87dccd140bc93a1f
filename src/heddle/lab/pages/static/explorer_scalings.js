// Scalings of a rotation: how many times slower each pair turns. Tests compare the frequencies with heddle's own.
"use strict";
const clamp = value => Math.min(1, Math.max(0, value));

// The index of the pair, maybe between two, that makes so many turns over the original length (YaRN).
const pairOfTurns = (part, turns, dims, base) =>
  Math.min(dims, Math.max(-dims, dims * Math.log(part.original_length / (turns * 2 * Math.PI)) / (2 * Math.log(base))));

// The frequencies of the pairs for a text of `tokens` tokens.
function scaledFrequencies(part, dims, base, tokens) {
  const before = pairFrequencies(dims, base), f = part.factor;
  if (part.kind === "linear") return before.map(theta => theta / f);
  if (part.kind === "ntk") {
    const s = part.original_length ? 1 + f * Math.max(0, tokens / part.original_length - 1) : f;
    return before.map((theta, index) => theta * s ** (-2 * index / (dims - 2)));
  }
  if (part.kind === "llama3") {
    const low = part.low_freq_factor ?? 1, high = part.high_freq_factor ?? 4;
    return before.map(theta => {
      const kept = clamp((part.original_length * theta / (2 * Math.PI) - low) / (high - low));
      return theta * (kept + (1 - kept) / f);
    });
  }
  if (part.kind === "proportional") {
    const rotated = Math.floor(part.rotated_share * dims / 2);
    return before.map((theta, index) => index < rotated ? theta / (f ?? 1) : 0);
  }
  if (part.kind === "longrope") {
    const factors = tokens > part.original_length ? part.long_factor : part.short_factor;
    return before.map((theta, index) => theta / factors[index]);
  }
  if (part.kind !== "yarn") return null;
  let fast = pairOfTurns(part, part.beta_fast ?? 32, dims, base), slow = pairOfTurns(part, part.beta_slow ?? 1, dims, base);
  if (part.truncate !== false) [fast, slow] = [Math.floor(fast), Math.ceil(slow)];
  [fast, slow] = [Math.max(fast, 0), Math.min(slow, dims - 1)];
  return before.map((theta, index) => {
    const slowed = clamp((index - fast) / (slow - fast || 0.001));
    return theta * (1 - slowed) + theta / f * slowed;
  });
}

function scalingPicture(part, rotation, v) {
  const dims = rotation.rotary_dim || v.rope_dim || v.head_dim || 64, base = rotation.base ?? 10000;
  if (dims > MOST_DRAWN) return tooMany;
  const after = scaledFrequencies(part, dims, base, v.tokens);
  if (!after) return html`<p class="small">No picture of this kind is known.</p>`;
  const slower = pairFrequencies(dims, base).map((theta, index) => Math.min(HUGE, theta / after[index]));
  const most = Math.max(2, ...slower.filter(value => value < HUGE)) * 1.1;  // pairs that stand still reach the top
  const wide = 340 / slower.length, y = value => 140 - Math.min(1, value / most) * 118;
  const body = [slower.map((value, index) => rect(46 + index * wide + wide * 0.1, y(value), wide * 0.8, 140 - y(value), value > 1.0001 ? SERIES[1] : SERIES[0], html`rx="1.5"`))];
  for (const value of [1, most / 2.2, most / 1.1]) body.push(text(40, y(value) + 4, short(value), html`text-anchor="end" class="tick"`));
  body.push(line(44, y(1), 390, y(1), "var(--ink)", html`stroke-dasharray="4 4"`));
  body.push(text(216, 160, "pairs, fast to slow", html`text-anchor="middle"`), text(46, 12, "times slower than without the scaling"));
  const still = slower.filter(value => value === HUGE).length, changed = slower.filter(value => value > 1.0001).length - still;
  const words = `${changed} of ${slower.length} pairs (orange) turn slower${still ? `, and ${still} stand still` : ""}, in a text of ${amount(v.tokens)} tokens.`;
  return [figure(svg(400, 168, "How many times slower each pair turns", body), words), wavelengthPicture(after, v)];
}
