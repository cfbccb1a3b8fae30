// Axes with round numbers that fit the unit. Pure functions.

import * as format from "./format.js";

const MIB = 1 << 20;
const plain = (n) => format.count(n);

/** How each unit of a series is written, and its axis: the `base` of its steps, the least top, or a fixed top. */
const UNITS = {
  bytes: { text: format.bytes, base: 1024, least: MIB },
  bytes_per_s: { text: (n) => format.bytes(n) + "/s", base: 1024, least: MIB },
  chunks: { text: (n) => format.count(Math.round(n)), base: 1000, least: 4, whole: true },
  tokens: { text: (n) => format.count(Math.round(n)), base: 1000, least: 4, whole: true },
  ratio: { text: format.share, base: 1000, fixed: 1 },
  per_s: { text: (n) => (n < 1000 ? format.significant(n) : plain(n)) + "/s", base: 1000, least: 1 },
};
const UNKNOWN = { text: plain, base: 1000, least: 1 };

export function unitOf(name) {
  return UNITS[name] ?? UNKNOWN;
}

/** "5.00 GiB" → "5 GiB": an axis needs no trailing zeros. */
export function tidy(text) {
  return text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");
}

/** {top, ticks: [{value, text}]}: about `wanted` even steps from 0 that cover `max`. */
export function valueAxis(max, unitName, wanted = 4) {
  const unit = unitOf(unitName);
  const reach = unit.fixed ?? Math.max(max, unit.least);
  let power = 1;
  while (reach / power >= unit.base) power *= unit.base;
  let step = niceStep(reach / power / wanted) * power;
  if (unit.whole) step = Math.max(1, Math.ceil(step));
  const steps = Math.max(1, Math.ceil(reach / step - 1e-9));
  const ticks = [];
  for (let i = 0; i <= steps; i += 1) ticks.push({ value: i * step, text: tidy(unit.text(i * step)) });
  return { top: steps * step, ticks };
}

function niceStep(rough) {
  const magnitude = 10 ** Math.floor(Math.log10(rough));
  const leading = rough / magnitude;
  return (leading <= 1 ? 1 : leading <= 2 ? 2 : leading <= 2.5 ? 2.5 : leading <= 5 ? 5 : 10) * magnitude;
}

const TIME_STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

/** Seconds before the newest point where the time axis has a mark, the newest first. */
export function timeTicks(spanS, wanted = 5) {
  const step = TIME_STEPS_S.find((s) => spanS / s <= wanted) ?? Math.ceil(spanS / wanted / 86400) * 86400;
  const ticks = [];
  for (let s = 0; s <= spanS; s += step) ticks.push({ value: s, text: s ? "−" + shortTime(s) : "latest" });
  return ticks;
}

function shortTime(s) {
  if (s < 60) return `${s}\u00a0s`;
  if (s < 3600) return s % 60 ? `${Math.floor(s / 60)}:${String(s % 60).padStart(2, "0")}` : `${s / 60}\u00a0min`;
  if (s >= 2 * 86400 && s % 86400 === 0) return `${s / 86400}\u00a0d`;
  return `${+(s / 3600).toFixed(1)}\u00a0h`;
}
