"use strict";
// Elements, texts and themes. Whatever a run says reaches the page as a text node, never as markup.
const F = {};

F.data = JSON.parse(document.getElementById("data").textContent);
F.$ = (id) => document.getElementById(id);

/** An element: h("td", {class: "number"}, "1.5", other). Children are text or elements. */
F.h = (tag, attributes, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
};

F.fill = (element, ...children) => element.replaceChildren(...children.filter((one) => one !== null && one !== undefined));

/** plotly reads some HTML in labels: what a run says is shown as it is written. */
F.label = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

F.short = (text, most) => (String(text).length > most ? `${String(text).slice(0, most - 1)}…` : String(text));

// The browser's own toLocaleString takes a hundred times as long, for thousands of labels.
const thousands = (value) => String(value).replace(/\B(?=(\d{3})+$)/g, ",");

/** A number with a few digits, thousands separated. */
F.number = (value, digits = 3) => {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return Math.abs(value) < 1e15 ? thousands(value) : String(value);
  const size = Math.abs(value);
  if (size >= 1000) return thousands(Math.round(value));
  return String(Number(value.toPrecision(size >= 100 ? Math.max(4, digits) : digits)));
};

F.known = (value) => value !== null && value !== undefined && value !== "";
F.gib = (bytes) => (bytes === null || bytes === undefined ? null : bytes / 2 ** 30);
F.size = (bytes) => {
  if (bytes === null || bytes === undefined) return "";
  return bytes >= 2 ** 30 ? `${F.number(bytes / 2 ** 30)} GiB` : `${F.number(bytes / 2 ** 20)} MiB`;
};
F.seconds = (s) => {
  if (s === null || s === undefined) return "";
  return s >= 1 ? `${F.number(s)} s` : `${F.number(1000 * s)} ms`;
};
F.plural = (count, word) => `${F.number(count)} ${word}${count === 1 ? "" : "s"}`;

// Colours that people with colour blindness tell apart, on white and on black.
F.colors = ["#4477aa", "#ee6677", "#228833", "#c8a415", "#3fa7c4", "#aa3377", "#8c8c8c", "#e07b39", "#6a5acd", "#2aa198"];
F.outcomeColors = {
  ok: "#2e8b57", oom: "#e08214", crashed: "#c0392b", hung: "#8e44ad", nonfinite: "#d6558f", illegal: "#7f8c8d", cancelled: "#aab2b8",
};
// Kinds of memory and parts of a step have one colour each wherever they are drawn.
F.partColors = {
  state: "#4477aa", activations: "#ee6677", logits: "#c8a415", gathered_weights: "#228833", base: "#8c8c8c",
  compute: "#4477aa", recompute: "#3fa7c4", tp: "#ee6677", cp: "#aa3377", ep: "#6a5acd", pp: "#c8a415", dp: "#228833", host: "#e07b39", other: "#8c8c8c",
};

F.KINDS = { state: "weights, gradients, optimizer", activations: "activations", logits: "logits and loss", gathered_weights: "gathered weights", base: "context and communicators" };

F.theme = {
  listeners: [],
  css: (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim(),
  stored() {
    try { return localStorage.getItem("fourfold-theme"); } catch { return null; } // a page without storage still has a button
  },
  set(name, keep) {
    document.documentElement.dataset.theme = name;
    F.$("theme").textContent = name === "dark" ? "Light" : "Dark";
    F.$("theme").setAttribute("aria-label", name === "dark" ? "Light colours" : "Dark colours");
    if (keep) try { localStorage.setItem("fourfold-theme", name); } catch { /* the choice lasts as long as the page */ }
    F.theme.listeners.forEach((listener) => listener());
  },
  start() {
    const system = matchMedia("(prefers-color-scheme: dark)");
    F.theme.set(F.theme.stored() || (system.matches ? "dark" : "light"), false);
    system.addEventListener("change", () => F.theme.stored() || F.theme.set(system.matches ? "dark" : "light", false));
    F.$("theme").addEventListener("click", () => F.theme.set(document.documentElement.dataset.theme === "dark" ? "light" : "dark", true));
  },
};

F.say = (text) => { F.$("status").textContent = text; };

/** A text to copy, with its button; what would steer a terminal it is pasted into is written out. */
F.copyable = (title, given) => {
  const text = given.replace(/[^\P{C}\n]/gu, (one) => `\\u${one.codePointAt(0).toString(16).padStart(4, "0")}`);
  const button = F.h("button", { type: "button" }, "Copy");
  const shown = F.h("pre", { tabindex: "0", "aria-label": title, role: "region" }, text);
  button.setAttribute("aria-label", `Copy: ${title}`);
  button.addEventListener("click", async () => {
    let done = true;
    try {
      await navigator.clipboard.writeText(text);
    } catch { // a file without rights to the clipboard: select, and let the old way copy
      getSelection().selectAllChildren(shown);
      done = document.execCommand("copy");
    }
    button.textContent = done ? "Copied" : "Press Ctrl+C";
    F.say(done ? `${title} copied` : `${title} is selected; press Ctrl+C`);
    setTimeout(() => { button.textContent = "Copy"; }, 1600);
  });
  return F.h("div", { class: "copyable" }, F.h("div", { class: "bar" }, F.h("strong", {}, title), button), shown);
};

F.select = (label, choices, value, onchange) => {
  const list = F.h("select", { onchange: () => onchange(list.value) });
  for (const [key, text] of choices) list.append(F.h("option", { value: key, selected: key === value }, text));
  const field = F.h("label", { class: "field" }, F.h("span", {}, label), list);
  field.list = list;
  return field;
};
