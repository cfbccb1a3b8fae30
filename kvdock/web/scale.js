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

const DAY_S = 86_400;
const TIME_STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, DAY_S];

/** How a moment of a chart is written: to the second, or in longer charts to the minute, with the day. */
export function moment(unixSeconds, intervalS) {
  if (intervalS < 60) return format.clock(unixSeconds);
  return `${format.day(unixSeconds)}, ${format.minuteClock(unixSeconds)}`;
}

/** [{at, text}]: round times of the reader's clock within the `spanS` seconds before `endS`, Unix seconds. */
export function timeTicks(endS, spanS, wanted = 5) {
  const step = TIME_STEPS_S.find((s) => spanS / s <= wanted) ?? Math.ceil(spanS / wanted / DAY_S) * DAY_S;
  const ticks = [];
  for (let at = lastRound(endS, step); at >= endS - spanS; at = before(at, step)) {
    ticks.push({ at, text: tickText(at, step) });
  }
  return ticks;
}

const midnight = (at) => new Date(at * 1000).setHours(0, 0, 0, 0) / 1000;

/** The last multiple of the step before `endS`, counted from the reader's midnight. */
function lastRound(endS, step) {
  const start = midnight(endS);
  return step >= DAY_S ? start : start + Math.floor((endS - start) / step) * step;
}

/** Days are those of the calendar, which may have 23 or 25 hours. */
function before(at, step) {
  if (step < DAY_S) return at - step;
  const date = new Date(at * 1000);
  return date.setDate(date.getDate() - step / DAY_S) / 1000;
}

function tickText(at, step) {
  if (at === midnight(at)) return format.day(at);
  return step < 60 ? format.clock(at) : format.minuteClock(at);
}
