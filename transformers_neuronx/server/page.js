"use strict";
// Chat with the model, and watch its server. Text of people, models and servers is inserted as text, never as markup.
const KEPT = "transformers-neuronx"; // in sessionStorage, which a reload keeps and another tab does not see
const at = (id) => document.getElementById(id);
const from = (id) => at(id).content.firstElementChild.cloneNode(true);
const short = (value) => Number(value.toPrecision(3)).toLocaleString("en");
const time = (seconds) => (seconds < 1 ? `${short(seconds * 1000)} ms` : `${short(seconds)} s`);
const count = (value) => value.toLocaleString("en");

function make(tag, text) {
  const element = document.createElement(tag);
  element.textContent = text;
  return element;
}

// Requests

const failure = (status, message) => Object.assign(new Error(message), { status });
const BROKEN = 0; // the status of answers that broke off after they had begun
const SENTENCES = {
  [BROKEN]: "The answer broke off", 401: "The server needs an API key, under Options", 429: "Too many requests at once",
  503: "The server cannot answer now",
};

function sentence(error) {
  if (error.status === undefined) return `The connection to the server failed (${error.message}).`;
  const what = SENTENCES[error.status] || `The server answered with error ${error.status}`;
  return error.message && error.status !== 401 ? `${what}: ${error.message}` : `${what}.`;
}

async function call(path, init = {}) {
  const key = option("key").value.trim();
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const here = location.origin + location.pathname; // without a password, which fetch refuses in addresses
  const response = await fetch(new URL(path, here), { ...init, headers });
  if (response.ok) return response;
  const body = await response.json().catch(() => null); // what stands between may answer without JSON
  throw failure(response.status, String(body?.error?.message ?? response.statusText));
}

// Yields the data of a stream's events. A chunk may end anywhere, also inside of a character.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      else if (!line && data.length) {
        yield data.join("\n");
        data = [];
      } // other fields, and comments, say nothing that is shown
    }
  }
}

// Options

const fields = [...at("options").querySelectorAll("[name]")];
const option = (name) => fields.find((field) => field.name === name);

// The fields of a request that were set. Others are not sent: the server has its own defaults.
function sampling() {
  const set = fields.filter((field) => field.type === "number" && field.value !== "");
  const given = Object.fromEntries(set.map((field) => [field.name, field.valueAsNumber]));
  const stop = option("stop").value.split("\n").filter(Boolean).map((each) => each.replaceAll("\\n", "\n"));
  return stop.length ? { ...given, stop } : given;
}

function showChosen() {
  const set = Object.entries(sampling()).map(([name, value]) => `${name.replace("_", " ")} ${JSON.stringify(value)}`);
  if (option("system").value) set.push("system prompt");
  at("chosen").textContent = set.join(", ");
}

// Chat

// { asked, images, text, told, error }: a message, its images as data URLs, its answer, numbers of the answer, why there
// is none
const turns = [];
const views = new WeakMap(); // their elements
let seeing = []; // the names of models that read images
let images = []; // of the message that is being written
let continues = false; // whether the model has no chat template
let running = null; // what aborts the answer that is coming

function keep() {
  const values = Object.fromEntries(fields.map((field) => [field.name, field.value]));
  const state = { turns, continues, values, model: at("model").value, draft: at("message").value, images };
  const texts = { ...state, turns: turns.map((turn) => ({ ...turn, images: [] })), images: [] };
  for (const kept of [state, texts]) {
    try {
      return sessionStorage.setItem(KEPT, JSON.stringify(kept));
    } catch {
      // There may be no room for images. Without storage, all works until the page is reloaded.
    }
  }
}

function restore() {
  try {
    const state = JSON.parse(sessionStorage.getItem(KEPT)) ?? {};
    for (const field of fields) field.value = state.values?.[field.name] ?? "";
    at("message").value = state.draft ?? "";
    for (const { asked, images: own, text, told, error } of state.turns ?? []) {
      const turn = { asked, text, told, error };
      if (Object.values(turn).every((each) => typeof each === "string")) add({ ...turn, images: pictured(own) });
    }
    images = pictured(state.images);
    setContinues(state.continues === true);
    return state.model;
  } catch {
    return null; // another program's data, or an older version's
  }
}

function setContinues(value) {
  continues = value;
  showImages();
  at("message").placeholder = value ? "Write the beginning of a text" : "Write a message";
  note(value ? "This model continues text; it has no chat template. An empty message lets it go on." : "");
}

function note(text) {
  at("note").textContent = text;
  at("note").hidden = !text;
}

// The body of a request. Messages without an answer are left out: most templates want one after the other.
function bodyOf(turn) {
  const told = [...turns.slice(0, turns.indexOf(turn)).filter((each) => each.text), { ...turn, text: "" }];
  const system = option("system").value;
  const body = { ...sampling(), stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  if (at("model").value) body.model = at("model").value;
  if (continues) {
    const parts = told.map((each) => (each.asked ? `\n${each.asked}` : "") + each.text);
    body.prompt = (system + parts.join("")).replace(/^\n/, "");
    return body;
  }
  const message = (role, content) => ({ role, content });
  const pairs = told.flatMap((each) => [message("user", contentOf(each)), message("assistant", each.text)]);
  body.messages = [...(system ? [message("system", system)] : []), ...pairs.slice(0, -1)];
  return body;
}

// A message: a text, or with images, which only some models read, a list of parts.
function contentOf({ asked, images }) {
  if (!sees() || !images.length) return asked;
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return asked ? [...parts, { type: "text", text: asked }] : parts;
}

async function ask(turn, signal) {
  const numbers = { began: performance.now() };
  const path = continues ? "v1/completions" : "v1/chat/completions";
  const response = await call(path, { method: "POST", body: JSON.stringify(bodyOf(turn)), signal }).catch((error) => {
    if (continues || !error.message.includes("no chat template")) throw error;
    setContinues(true);
  });
  if (!response) return ask(turn, signal);
  for await (const data of eventsOf(response)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw failure(BROKEN, event.error.message);
    const [choice] = event.choices;
    const text = choice?.delta?.content ?? choice?.text ?? "";
    turn.text += text;
    if (text) numbers.last = performance.now();
    numbers.first ??= numbers.last;
    numbers.usage = event.usage ?? numbers.usage;
    numbers.reason = choice?.finish_reason ?? numbers.reason;
    turn.told = toldOf(numbers);
    drawSoon(turn);
  }
  throw failure(BROKEN, "the connection was closed");
}

const REASONS = { length: "token limit reached", abort: "ended by the server" };

function toldOf({ began, first, last, usage, reason }) {
  const told = [];
  const tokens = usage?.completion_tokens;
  if (tokens) told.push(tokens === 1 ? "1 token" : `${tokens} tokens`);
  if (tokens > 1 && last > first) told.push(`${short((1000 * (tokens - 1)) / (last - first))} tokens/s`);
  if (first) told.push(`first token after ${time((first - began) / 1000)}`);
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (cached) told.push(`${cached} of ${usage.prompt_tokens} prompt tokens cached`);
  if (REASONS[reason]) told.push(REASONS[reason]);
  return told.join(" · ");
}

async function answer(turn) {
  running = new AbortController();
  Object.assign(turn, { text: "", told: "", error: "" });
  setBusy(turn, true);
  try {
    await ask(turn, running.signal);
  } catch (error) {
    if (running.signal.aborted) turn.told = [turn.told, "stopped"].filter(Boolean).join(" · ");
    else turn.error = sentence(error);
  }
  running = null;
  setBusy(turn, false);
  at("spoken").textContent = turn.error || turn.text;
  keep();
}

function setBusy(turn, busy) {
  views.get(turn).classList.toggle("busy", busy);
  at("send").textContent = busy ? "Stop" : "Send";
  draw(turn);
}

function send() {
  const asked = at("message").value.trim();
  const shown = sees() ? images : []; // what another model reads waits for that one
  if (running || !(asked || shown.length || (continues && turns.length))) return;
  const turn = { asked, images: shown, text: "", told: "", error: "" };
  at("message").value = "";
  if (shown.length) images = [];
  showImages();
  add(turn);
  at("turns").scrollTop = at("turns").scrollHeight;
  answer(turn);
}

const stop = () => running?.abort();

function clear() {
  stop();
  for (const turn of turns.splice(0)) views.get(turn).remove();
  images = [];
  setContinues(false);
  keep();
  at("message").focus();
}

function add(turn) {
  const view = from("turn");
  view.querySelector(".asked").lastElementChild.textContent = turn.asked;
  view.querySelector(".pictures").append(...turn.images.map(picture));
  view.querySelector(".copy").addEventListener("click", (event) => copy(turn.text, event.target));
  view.querySelector(".retry").addEventListener("click", () => {
    at("message").focus(); // the button goes
    if (!running) answer(turn);
  });
  views.set(turn, view);
  turns.push(turn);
  at("turns").append(view);
  draw(turn);
}

// Draws what may have changed. Who reads the end keeps seeing it; who has scrolled up is left alone.
function draw(turn) {
  const box = at("turns");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  const find = (name) => views.get(turn).querySelector(name);
  find(".answer").replaceChildren(...blocks(turn.text));
  find(".error").textContent = turn.error;
  find(".told").textContent = turn.told;
  find(".copy").hidden = !turn.text;
  find(".retry").hidden = !turn.error;
  if (atEnd) box.scrollTop = box.scrollHeight;
}

let frame = 0;
function drawSoon(turn) {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    draw(turn);
  });
}

// Text, and code between lines that begin with ```. The last fence may still be open.
function blocks(text) {
  const parts = text.split(/^ {0,3}```[^`\n]*(?:\n|$)/m);
  const elements = parts.map((part, place) => {
    return place % 2 ? make("pre", part.trimEnd()) : make("div", part.replace(/^\n+|\s+$/g, ""));
  });
  return elements.filter((element) => element.textContent);
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // away from localhost and HTTPS there is no clipboard
    const area = make("textarea", text);
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  at("spoken").textContent = button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

// Images

const SIDE = 2048; // pixels: of larger images, models see no more
const SMALL = 2 ** 20; // bytes of a file that is sent as it is
const KINDS = ["image/bmp", "image/gif", "image/jpeg", "image/png", "image/webp"]; // that the server reads

const sees = () => !continues && seeing.includes(at("model").value);
const pictured = (kept) => (kept ?? []).filter((each) => String(each).startsWith("data:image/"));

function picture(url, place) {
  const image = make("img", "");
  image.alt = `Image ${place + 1}`;
  image.src = url;
  return image;
}

function showImages() {
  at("attach").hidden = !sees();
  at("images").replaceChildren(...(sees() ? images : []).map((url, place) => {
    const button = make("button", "");
    button.type = "button";
    button.title = `Remove image ${place + 1}`;
    button.setAttribute("aria-label", button.title);
    button.append(picture(url, place));
    button.addEventListener("click", () => {
      images = images.filter((_, other) => other !== place);
      showImages();
      at("message").focus();
    });
    return button;
  }));
}

async function attach(files) {
  const refused = [];
  for (const file of files) {
    try {
      const url = await urlOf(file); // meanwhile others may come or go
      images = [...images, url];
    } catch {
      refused.push(file.name);
    }
  }
  note(refused.length ? `This browser reads no image in ${refused.join(", ")}.` : "");
  showImages();
  at("message").focus();
}

// A file as a data URL. Large images shrink, and then have no transparency.
async function urlOf(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, SIDE / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && file.size <= SMALL && KINDS.includes(file.type)) {
    const reader = new FileReader();
    const read = new Promise((resolve, reject) => Object.assign(reader, { onload: resolve, onerror: reject }));
    reader.readAsDataURL(file);
    await read;
    return reader.result;
  }
  const canvas = make("canvas", "");
  [canvas.width, canvas.height] = [bitmap.width, bitmap.height].map((size) => Math.max(1, Math.round(size * scale)));
  const drawing = canvas.getContext("2d");
  drawing.fillStyle = "white";
  drawing.fillRect(0, 0, canvas.width, canvas.height);
  drawing.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

async function showModels() {
  const chosen = at("model").value || restored;
  let names = [];
  try {
    const models = (await (await call("v1/models")).json()).data;
    names = models.map((model) => model.id);
    seeing = models.filter((model) => model.capabilities?.includes("multimodal")).map((model) => model.id);
    setContinues(continues); // and no word about a key that is there now
  } catch (error) {
    note(sentence(error));
  }
  at("model").replaceChildren(...names.map((name) => make("option", name)));
  if (names.includes(chosen)) at("model").value = chosen;
  at("model").hidden = names.length < 2;
  at("name").textContent = names.length === 1 ? names[0] : "";
  if (names.length) nameModel();
}

function nameModel() {
  showImages();
  document.title = `${at("model").value} · transformers-neuronx`;
  at("greeting").textContent = at("model").value;
}

// The server

// Calls `look` at once and then again and again, while someone sees the page, and what `look` fills.
function watch(seconds, element, look) {
  let looking = false;
  const again = async () => {
    if (looking || document.visibilityState !== "visible" || !element.checkVisibility()) return;
    looking = true;
    await look().finally(() => { looking = false; });
  };
  document.addEventListener("visibilitychange", again);
  setInterval(again, 1000 * seconds);
  again();
  return again;
}

async function showHealth() {
  let text = "healthy";
  try {
    await call("health", { signal: AbortSignal.timeout(4000) });
  } catch (error) {
    text = error.status === undefined ? "not reachable" : "not healthy";
  }
  if (at("health").textContent === text) return; // a change is spoken
  at("health").textContent = text;
  at("health").classList.toggle("bad", text !== "healthy");
  if (text === "healthy") showModels(); // it may have been started again, with another one
}

let metrics = new Map(); // for each name its samples, { labels, value }

// Reads Prometheus' text format.
function parsed(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const [, name, inside, value] = line.match(/^transformers_neuronx_(\w+)(?:\{(.*)\})?\s+(\S+)/) ?? [];
    if (!name) continue;
    const labels = {};
    for (const [, label, held] of (inside ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[label] = held;
    found.set(name, [...(found.get(name) ?? []), { labels, value: Number(value) }]);
  }
  return found;
}

// For each value of a label, the sum of a metric.
function sums(name, label) {
  const found = new Map();
  for (const { labels, value } of metrics.get(name) ?? []) {
    found.set(labels[label], value + (found.get(labels[label]) ?? 0));
  }
  return [...found];
}

const total = (name) => (metrics.get(name) ?? []).reduce((sum, { value }) => sum + value, 0);

const LENGTH = 60; // samples of a curve
const RATES = ["generated_tokens_total", "prompt_tokens_total"];
const samples = []; // [time in seconds, ...counters of RATES]

function sample() {
  const now = [performance.now() / 1000, ...RATES.map(total)];
  const last = samples.at(-1);
  // After a pause, or when the server was started again, differences say nothing.
  if (last && (now[0] - last[0] > 5 || now.some((value, place) => value < last[place]))) samples.length = 0;
  samples.push(now);
  if (samples.length > LENGTH) samples.shift();
}

// Pictures of height 1: a class, a width, and a path.
const levelOf = (held, all) => ["level", 1, `M0 0H${all ? held / all : 0}V1H0z`];

function curveOf(values) {
  const most = Math.max(...values, 1);
  const begin = LENGTH - values.length; // the newest is at the right
  return ["curve", LENGTH - 1, values.map((value, x) => `${x ? "L" : "M"}${begin + x} ${1 - value / most}`).join("")];
}

function barsOf(values) {
  const most = Math.max(...values);
  return ["bars", values.length, values.map((value, x) => `M${x + 0.04} 1V${1 - value / most}h.92V1z`).join("")];
}

// What a tile shows: a value, its unit, more about it, and a picture, which may begin and end with something.

const number = (name) => ({ value: count(total(name)) });

const level = (unit) => (name, whole) => {
  const [held, all] = [total(name), total(whole)];
  return { value: count(held), unit: `of ${count(all)} ${unit}`, picture: levelOf(held, all) };
};

const proportion = (unit) => (name, whole) => {
  const [held, all] = [total(name), total(whole)];
  const value = `${short(all ? (100 * held) / all : 0)} %`;
  return { value, more: `${count(held)} of ${count(all)} ${unit}`, picture: levelOf(held, all) };
};

const drafts = (name, whole) => total(name) && proportion("tokens")(name, whole); // most engines have none

function rate(name) {
  const column = RATES.indexOf(name) + 1;
  const rates = samples.slice(1).map((now, place) => { // over three seconds, or they would jump with every step
    const before = samples[Math.max(place - 2, 0)];
    return (now[column] - before[column]) / (now[0] - before[0]);
  });
  const value = rates.length ? short(rates.at(-1)) : "–";
  return { value, unit: "tokens/s", more: `${count(total(name))} in all`, picture: curveOf(rates) };
}

function reasons(name) {
  const told = sums(name, "reason").filter(([, held]) => held).map(([reason, held]) => `${count(held)} ${reason}`);
  return { value: count(total(name)), more: told.join(", ") };
}

function histogram(name) {
  const all = total(`${name}_count`);
  if (!all) return { value: "–", more: "none yet" };
  const buckets = sums(`${name}_bucket`, "le").map(([le, held]) => [Number(le.replace("+Inf", "Infinity")), held]);
  buckets.sort(([a], [b]) => a - b); // each has all times up to its bound
  const bars = buckets.map(([, held], place) => held - (place && buckets[place - 1][1]));
  const [first, last] = [bars.findIndex(Boolean), bars.findLastIndex(Boolean)];
  const bound = (place) => (place < 0 ? "0 ms" : buckets[place][0] < Infinity ? time(buckets[place][0]) : "∞");
  const within = (share) => bound(buckets.findIndex(([, held]) => held >= share * all));
  return {
    value: time(total(`${name}_sum`) / all), unit: "on average", begin: bound(first - 1), end: bound(last),
    more: `half within ${within(0.5)}, 95 % within ${within(0.95)}`, picture: barsOf(bars.slice(first, last + 1)),
  };
}

// A tile's title, what it shows, and of which metrics. Without one of them it is hidden.
const TILES = [
  ["Running", level("rows"), "requests_running", "rows"],
  ["Waiting", number, "requests_waiting"],
  ["Generated", rate, "generated_tokens_total"],
  ["Prompts", rate, "prompt_tokens_total"],
  ["Cache", proportion("positions"), "cache_positions_used", "cache_positions"],
  ["Prefix hits", proportion("prompt tokens"), "cached_prompt_tokens_total", "prompt_tokens_total"],
  ["Accepted drafts", drafts, "accepted_draft_tokens_total", "generated_tokens_total"],
  ["Finished", reasons, "finished_requests_total"],
  ["Preemptions", number, "preemptions_total"],
  ["Time to first token", histogram, "time_to_first_token_seconds"],
  ["Time between tokens", histogram, "inter_token_seconds"],
  ["Time in the queue", histogram, "queue_seconds"],
  ["Whole request", histogram, "request_seconds"],
].map(([title, show, ...names]) => {
  const view = from("tile");
  view.querySelector("h3").textContent = title;
  at("tiles").append(view);
  return { view, show, names };
});

function showTile({ view, show, names }) {
  const shown = names.every((name) => metrics.has(name) || metrics.has(`${name}_bucket`)) && show(...names);
  view.hidden = !shown;
  if (!shown) return;
  const find = (part) => view.querySelector(part);
  for (const part of ["value", "unit", "more", "begin", "end"]) find(`.${part}`).textContent = shown[part] ?? "";
  const [kind, width, path] = shown.picture ?? ["none", 1, ""];
  const svg = find("svg");
  svg.setAttribute("class", kind);
  svg.setAttribute("viewBox", `0 0 ${width} 1`);
  svg.firstElementChild.setAttribute("d", path);
}

async function showServer() {
  let trouble = "";
  try {
    const response = await call("metrics", { signal: AbortSignal.timeout(4000) });
    metrics = parsed(await response.text());
    sample();
  } catch (error) {
    metrics = new Map();
    trouble = `There are no numbers of the server now. ${sentence(error)}`;
  }
  if (at("trouble").textContent !== trouble) at("trouble").textContent = trouble; // a change is spoken
  TILES.forEach(showTile);
}

// Start

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) stop();
  else send();
});
at("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return; // Enter also ends the input of a character
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing) stop();
});
at("attach").addEventListener("click", () => at("files").click());
at("files").addEventListener("change", async () => {
  await attach([...at("files").files]);
  at("files").value = ""; // the same file may come again
});
for (const [name, given] of [["paste", "clipboardData"], ["drop", "dataTransfer"]]) {
  document.addEventListener(name, (event) => {
    const files = [...event[given].files].filter((file) => file.type.startsWith("image/"));
    if (!sees() || !files.length) return;
    event.preventDefault();
    attach(files);
  });
}
document.addEventListener("dragover", (event) => {
  if (sees() && event.dataTransfer.types.includes("Files")) event.preventDefault(); // or the browser opens the file
});
at("options").addEventListener("input", showChosen);
at("new").addEventListener("click", clear);
at("model").addEventListener("change", nameModel);
addEventListener("pagehide", keep);
const restored = restore();
showChosen();
at("message").focus();
watch(5, at("health"), showHealth);
const lookAtServer = watch(1, at("server"), showServer);
option("key").addEventListener("change", () => {
  showModels();
  lookAtServer();
});
const choices = [...document.querySelectorAll("nav button")];
for (const button of choices) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.view;
    for (const each of choices) each.setAttribute("aria-pressed", String(each === button));
    lookAtServer();
  });
}
