// Talks to the models of its server: OpenAI's API for answers, /chat/ for internals.
(() => {
  "use strict";
  const models = JSON.parse(document.getElementById("models-data").textContent);
  const $ = (id) => document.getElementById(id);
  const ALTERNATIVES = 5;
  const POINTS = 63; // of the curve of the state; the server answers at most 64 at once
  let halting = null; // aborts the answers in progress

  const element = (name, text = "", className = "") => {
    const made = document.createElement(name);
    if (text) made.textContent = text;
    if (className) made.className = className;
    return made;
  };

  const drawing = (name, attributes, ...children) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };

  // The tokens in an answer's events, from both of OpenAI's formats: {text, id, probability, alternatives}.
  const scoresOf = (logprobs) => {
    if (!logprobs) return [];
    if (logprobs.content) {
      return logprobs.content.map((each) => ({
        text: each.token, id: each.id, probability: Math.exp(each.logprob),
        alternatives: each.top_logprobs.map((other) => [other.token, Math.exp(other.logprob)]),
      }));
    }
    return logprobs.tokens.map((text, index) => ({
      text, id: logprobs.token_ids[index], probability: Math.exp(logprobs.token_logprobs[index]),
      alternatives: Object.entries(logprobs.top_logprobs[index]).map(([other, value]) => [other, Math.exp(value)]),
    }));
  };

  const ask = async (address, body, signal) => {
    const answer = await fetch(address, { method: "POST", body: JSON.stringify(body), signal });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    return answer;
  };

  // The data of a stream of server-sent events.
  const events = async function* (answer) {
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line === "data: [DONE]") return;
        if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
      }
    }
  };

  class Model {
    constructor(facts, root) {
      Object.assign(this, { facts, root, turns: [], view: null });
      this.transcript = root.querySelector(".transcript");
      this.status = root.querySelector(".status");
      root.querySelector(".layer").onchange = () => this.showHeads();
      root.querySelector(".head").onchange = () => this.showAttention();
      this.transcript.onkeydown = (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        const tokens = [...this.transcript.querySelectorAll(".token")];
        if (!step || !tokens.length) return;
        event.preventDefault();
        const now = tokens.findIndex((token) => token.getAttribute("aria-current"));
        const next = tokens[now < 0 ? tokens.length - 1 : Math.min(tokens.length - 1, Math.max(0, now + step))];
        next.scrollIntoView({ block: "nearest" });
        next.onclick();
      };
    }

    get isChat() { return this.facts.is_chat && $("mode").value === "chat"; }

    request(turns) {
      const settings = {
        model: this.facts.name, temperature: $("temperature").valueAsNumber, top_p: $("top-p").valueAsNumber,
        top_k: $("top-k").valueAsNumber || 0, max_tokens: $("max-tokens").valueAsNumber,
      };
      if ($("seed").value) settings.seed = $("seed").valueAsNumber;
      if ($("stop").value) settings.stop = [$("stop").value];
      const asked = turns[turns.length - 1].asked, before = turns.slice(0, -1);
      if (!this.isChat) return { ...settings, prompt: before.map((turn) => turn.asked + turn.text).join("") + asked };
      const messages = before.flatMap((turn) => [
        { role: "user", content: turn.asked }, { role: "assistant", content: turn.text },
      ]);
      return { ...settings, messages: [...messages, { role: "user", content: asked }] };
    }

    async answer(asked, signal) {
      const turn = { asked, text: "", tokens: [], kind: this.isChat ? "chat" : "completions" };
      const turns = [...this.turns, turn];
      turn.request = this.request(turns);
      const scored = this.isChat ? { logprobs: true, top_logprobs: ALTERNATIVES } : { logprobs: ALTERNATIVES };
      const body = { ...turn.request, ...(this.facts.has_scores ? scored : {}), stream: true,
                     stream_options: { include_usage: true, continuous_usage_stats: true } };
      const address = this.facts.address + (this.isChat ? "/v1/chat/completions" : "/v1/completions");
      this.say("");
      this.turns = turns;
      const paragraph = this.show(turn);
      this.sizes = undefined;
      const started = performance.now();
      try {
        for await (const event of events(await ask(address, body, signal))) {
          if (event.error) throw new Error(event.error.message);
          if (event.usage) await this.grow(turn, event.usage, body.max_tokens);
          const choice = event.choices[0];
          if (!choice) continue;
          const piece = choice.text ?? choice.delta.content ?? "";
          turn.text += piece;
          const tokens = scoresOf(choice.logprobs);
          turn.tokens.push(...tokens);
          if (this.facts.has_scores) for (const token of tokens) paragraph.append(this.token(turn, token));
          else paragraph.append(piece);
          if (tokens.length) this.showToken(tokens[tokens.length - 1]);
          this.transcript.scrollTop = this.transcript.scrollHeight;
        }
        const seconds = (performance.now() - started) / 1000;
        if (turn.usage) this.say(`${turn.usage.completion_tokens} tokens, ${(turn.usage.completion_tokens / seconds).toFixed(1)} per second`);
      } catch (error) {
        if (error.name === "AbortError") this.say("stopped");
        else {
          this.turns.pop();
          this.showAll();
          this.say(error.message, true);
          return;
        }
      }
      this.root.querySelector(".views").hidden = false;
      if (turn.tokens.length) await this.choose(turn, turn.tokens.length - 1);
      else await this.look(turn, turn.text);
      const now = turn.usage?.total_tokens ?? this.view?.tokens.length ?? 1;
      await this.readSizes(1, now, Math.max(64, 2 * now));
      this.showState(now);
    }

    // While an answer streams: the state of the tokens so far, on the way to its maximum length.
    async grow(turn, usage, newTokens) {
      turn.usage = usage;
      this.root.querySelector(".views").hidden = false;
      if (this.sizes === undefined) await this.readSizes(1, usage.prompt_tokens, usage.prompt_tokens + newTokens);
      this.showState(usage.total_tokens);
    }

    say(text, failed = false) {
      this.status.textContent = text;
      this.status.classList.toggle("failed", failed);
    }

    show(turn) {
      this.transcript.querySelector(".empty")?.remove();
      const joined = turn.kind === "chat" ? "" : " joined";
      this.transcript.append(element("p", turn.asked, `asked${joined || " message"}`));
      const paragraph = element("p", "", joined.trim());
      this.transcript.append(paragraph);
      return paragraph;
    }

    showAll() {
      this.transcript.replaceChildren(...(this.turns.length ? [] : [element("p", "No messages yet.", "small empty")]));
      this.root.querySelector(".views").hidden = !this.turns.length;
      for (const turn of this.turns) {
        const paragraph = this.show(turn);
        if (turn.tokens.length) paragraph.append(...turn.tokens.map((token) => this.token(turn, token)));
        else paragraph.append(turn.text);
      }
    }

    token(turn, token) {
      const span = element("span", token.text, "token");
      span.style.setProperty("--heat", `${Math.round(45 * (1 - token.probability))}%`);
      span.title = `${(100 * token.probability).toFixed(1)} %`;
      span.onclick = () => this.choose(turn, turn.tokens.indexOf(token));
      token.span = span;
      return span;
    }

    async choose(turn, index) {
      this.showToken(turn.tokens[index]);
      await this.look(turn, turn.tokens.slice(0, index).map((each) => each.id));
    }

    showToken(token) {
      for (const other of this.transcript.querySelectorAll("[aria-current]")) other.removeAttribute("aria-current");
      token.span.setAttribute("aria-current", "true");
      const rows = [[token.text, token.probability], ...token.alternatives.filter(([text]) => text !== token.text)];
      this.root.querySelector(".chosen").replaceChildren(...rows.map(([text, probability], number) => {
        const row = element("div", "", number ? "" : "picked"), bar = element("i");
        bar.style.setProperty("--share", `${100 * probability}%`);
        row.append(element("code", JSON.stringify(text)), element("span", `${(100 * probability).toFixed(1)} %`), bar);
        return row;
      }));
    }

    // What the step after this part of the answer attended to. reply: its tokens, or its text if they are unknown.
    async look(turn, reply) {
      const asked = (this.asked = Symbol("only the newest choice is shown"));
      try {
        const body = { kind: turn.kind, request: turn.request, reply };
        const view = await (await ask(`${this.facts.address}/chat/attention`, body)).json();
        if (asked !== this.asked) return;
        this.view = view;
        const layer = this.root.querySelector(".layer"), before = layer.value;
        const last = view.layers.map((each) => Boolean(each.heads)).lastIndexOf(true);
        layer.replaceChildren(...view.layers.map((each, index) => {
          const option = element("option", `${index}: ${each.mixer}`);
          option.value = index;
          option.disabled = !each.heads;
          return option;
        }));
        layer.value = before || String(last);
        this.showHeads();
      } catch (error) {
        if (asked === this.asked) this.root.querySelector(".attended").textContent = error.message;
      }
    }

    showHeads() {
      const heads = this.view.layers[this.root.querySelector(".layer").value]?.heads ?? [];
      const head = this.root.querySelector(".head"), before = head.value;
      const names = ["mean", ...heads.keys()];
      head.replaceChildren(...names.map((name) => Object.assign(element("option", String(name)), { value: name })));
      head.value = names.map(String).includes(before) ? before : "mean";
      this.showAttention();
    }

    showAttention() {
      const heads = this.view.layers[this.root.querySelector(".layer").value]?.heads;
      const attended = this.root.querySelector(".attended");
      if (!heads) {
        attended.textContent = "This model's layers keep no attention weights.";
        return;
      }
      const choice = this.root.querySelector(".head").value;
      const row = choice === "mean"
        ? heads[0].map((_, index) => heads.reduce((sum, head) => sum + head[index], 0) / heads.length)
        : heads[Number(choice)];
      attended.replaceChildren(...this.view.tokens.map((text, index) => {
        const span = element("span", text);
        span.style.setProperty("--heat", `${Math.round(90 * Math.sqrt(Math.max(0, row[index])))}%`);
        span.title = row[index].toFixed(4);
        return span;
      }));
    }

    // The bytes of the state at lengths from the first to the last, and at `now`; the server's, or its refusal.
    async readSizes(first, now, last) {
      const step = Math.max(1, Math.ceil((last - first) / (POINTS - 1)));
      const steps = Array.from({ length: POINTS }, (_, index) => Math.min(last, first + index * step));
      const lengths = [...new Set([...steps, now])].sort((a, b) => a - b);
      try {
        const { bytes } = await (await ask(`${this.facts.address}/chat/state`, { lengths })).json();
        this.sizes = { lengths, bytes };
      } catch (error) {
        this.sizes = null;
        this.root.querySelector(".state").textContent = error.message;
      }
    }

    // The line of the sizes: strong up to the tokens so far, pale beyond.
    showState(now) {
      if (!this.sizes) return;
      const { lengths, bytes } = this.sizes, last = lengths[lengths.length - 1], most = Math.max(...bytes);
      const at = sizeAt(this.sizes, now), x = (length) => (100 * length / last).toFixed(2), y = (size) => (88 - 80 * size / most).toFixed(2);
      const points = lengths.map((length, index) => [length, bytes[index]]);
      const drawn = (pairs, more) => drawing("polyline", {
        points: pairs.map(([length, size]) => `${x(length)},${y(size)}`).join(" "),
        fill: "none", stroke: "var(--series-3)", "vector-effect": "non-scaling-stroke", ...more,
      });
      const text = element("p", `${lengths.includes(now) ? "" : "about "}${readable(at)} for the ${now.toLocaleString("en")} tokens so far; ${readable(bytes[bytes.length - 1])} at ${last.toLocaleString("en")}`);
      const picture = drawing("svg", { role: "img", "aria-label": "bytes of the state over tokens" },
        drawing("svg", { viewBox: "0 0 100 90", preserveAspectRatio: "none", width: "100%", height: "100%" },
          drawing("line", { x1: 0, x2: 100, y1: 88, y2: 88, stroke: "var(--line)", "vector-effect": "non-scaling-stroke" }),
          drawn(points, { "stroke-width": 1.5, opacity: 0.4 }),
          drawn([...points.filter(([length]) => length < now), [now, at]], { "stroke-width": 2.75 })),
        drawing("circle", { cx: `${x(now)}%`, cy: `${y(at) / 0.9}%`, r: 5, fill: "var(--series-3)" }));
      this.root.querySelector(".state").replaceChildren(text, picture);
    }
  }

  // Bytes at a length: measured, or interpolated between its neighbors.
  const sizeAt = ({ lengths, bytes }, now) => {
    const next = lengths.findIndex((length) => length >= now);
    if (next < 1) return bytes[next < 0 ? bytes.length - 1 : 0];
    const share = (now - lengths[next - 1]) / (lengths[next] - lengths[next - 1]);
    return Math.round(bytes[next - 1] + share * (bytes[next] - bytes[next - 1]));
  };

  const readable = (bytes) => {
    const units = ["bytes", "kB", "MB", "GB"];
    let power = 0;
    while (bytes >= 1000 && power < 3) [bytes, power] = [bytes / 1000, power + 1];
    return `${power ? bytes.toFixed(1) : bytes} ${units[power]}`;
  };

  const all = models.map((facts, index) => new Model(facts, document.querySelector(`[data-model="${index}"]`)));

  const answer = async () => {
    const text = $("text").value;
    if (halting || !$("controls").reportValidity()) return;
    halting = new AbortController();
    $("send").disabled = true;
    $("halt").disabled = false;
    $("text").value = "";
    await Promise.all(all.map((model) => model.answer(text, halting.signal)));
    if (all.every((model) => model.status.classList.contains("failed"))) $("text").value = text;
    halting = null;
    $("send").disabled = false;
    $("halt").disabled = true;
  };

  const showMode = () => {
    $("text-label").textContent = $("mode").value === "chat" ? "Your message" : "Prompt; leave it empty to continue the last answer";
  };
  $("say").onsubmit = (event) => { event.preventDefault(); answer(); };
  $("controls").onsubmit = (event) => event.preventDefault();
  $("text").onkeydown = (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) answer(); };
  $("halt").onclick = () => halting?.abort();
  $("undo").onclick = () => { if (!halting) for (const model of all) { model.turns.pop(); model.showAll(); model.say(""); } };
  $("reset").onclick = () => { if (!halting) for (const model of all) { model.turns = []; model.showAll(); model.say(""); } };
  $("mode").onchange = () => { showMode(); $("reset").onclick(); };
  showMode();
})();
