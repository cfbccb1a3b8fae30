// Figures as people write them. Pure functions; a no-break space stands between number and unit.

const NB = "\u00a0";
const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const COUNT_UNITS = ["", "k", "M", "G", "T"];
const MINUS = "\u2212";
const grouped = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 0 });

/**
 * Characters that cannot be seen, or that change the direction of others: controls, format characters, unusual spaces,
 * and others that look like a space. The no-break space is the page's own: `received` tells those of names apart.
 */
const UNSEEN =
  /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}\u2800\u{16fe4}\u{1d159}]|(?![ \u00a0])\p{Zs}/u;
const ALL_UNSEEN = new RegExp(UNSEEN, "gu");
/** Half of a character, which no answer can have. */
const NB_OF_A_NAME = "\ud8a0";

/** An answer of the server, in which no-break spaces are those of names. */
export const received = (text) => text.replaceAll(NB, NB_OF_A_NAME);
/** A received name as the server knows it. */
export const original = (name) => name.replaceAll(NB_OF_A_NAME, NB);

/** The text with each such character as an escape: "a\u202eb" for one that turns the text around. */
export function visible(text) {
  const all = String(text);
  return UNSEEN.test(all) ? all.replace(ALL_UNSEEN, escaped) : all;
}

function escaped(character) {
  const hex = original(character).codePointAt(0).toString(16);
  return hex.length > 4 ? `\\u{${hex}}` : `\\u${hex.padStart(4, "0")}`;
}

/** Three significant digits, never in exponent form. */
export function significant(n) {
  const size = Math.abs(n);
  if (size >= 99.95 || n === 0) return grouped.format(n);
  return n.toFixed(size >= 9.995 ? 1 : 2);
}

/** [value, step]: n divided by `base` until it prints below it; at most `last` times. */
function reduce(n, base, last) {
  let step = 0;
  while (step < last && Math.abs(n) >= base - 0.5) {
    n /= base;
    step += 1;
  }
  return [n, step];
}

export function bytes(n) {
  const [value, step] = reduce(n, 1024, BYTE_UNITS.length - 1);
  return (step === 0 ? grouped.format(value) : significant(value)) + NB + BYTE_UNITS[step];
}

/** Exact below 100,000, then three digits and a letter. */
export function count(n) {
  if (Math.abs(n) < 100_000) return grouped.format(n);
  const [value, step] = reduce(n, 1000, COUNT_UNITS.length - 1);
  return significant(value) + NB + COUNT_UNITS[step];
}

export function exact(n) {
  return grouped.format(n);
}

/** A share 0..1 in per cent: 0 % and 100 % only when it is exactly that. */
export function share(x) {
  if (x > 0 && x < 0.001) return "<0.1" + NB + "%";
  const percent = x < 1 ? Math.min(x * 100, 99.9) : x * 100;
  const whole = percent === 0 || (percent >= 9.95 && percent < 99) || x >= 1;
  return percent.toFixed(whole ? 0 : 1) + NB + "%";
}

/** The weights whose chunks are in a namespace, short; "" for those that engines start with. */
export function weightsName(weights) {
  if (weights === null) return "weights unknown";
  const text = weights ?? "";
  return text && `weights ${text.length > 24 ? `${text.slice(0, 23)}…` : text}`;
}

/** part/whole as a share; a dash when there is no whole. */
export function shareOf(part, whole) {
  return whole > 0 ? share(part / whole) : "–";
}

/** Seconds as the two largest units: 0.4 s, 42 s, 4 min 10 s, 3 h 12 min, 4 d 3 h; with a sign below zero. */
export function age(seconds) {
  return isLoss(seconds) ? MINUS + positive(-seconds) : positive(Math.abs(seconds));
}

/** Whether saved seconds are below zero, as far as they are shown. */
export const isLoss = (seconds) => seconds <= -0.05;

/** Saved seconds as a sentence without its stop. */
export function savedWords(seconds) {
  return age(seconds) + (isLoss(seconds) ? ": loads took longer than computing" : " of computing");
}

function positive(s) {
  if (s < 9.95) return s.toFixed(1) + NB + "s";
  const whole = Math.round(s);
  if (whole < 60) return whole + NB + "s";
  const pair = (big, bigUnit, small, smallUnit) =>
    big + NB + bigUnit + (small ? NB + small + NB + smallUnit : "");
  if (whole < 3600) return pair(Math.floor(whole / 60), "min", whole % 60, "s");
  const minutes = Math.floor(whole / 60);
  if (minutes < 1440) return pair(Math.floor(minutes / 60), "h", minutes % 60, "min");
  const hours = Math.floor(minutes / 60);
  return pair(Math.floor(hours / 24), "d", hours % 24, "h");
}

/** The largest unit alone, rounded down: "4 min". Empty if it is not known. */
export function about(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  return age(seconds).split(NB).slice(0, 2).join(NB);
}

/** A rate of bytes; a dash where it is not known. */
export function rate(bytesPerS) {
  return bytesPerS === null || bytesPerS === undefined ? "–" : bytes(bytesPerS) + "/s";
}

/** Like `age`, but without tenths, for figures that count up on the page. */
export function wholeAge(seconds) {
  return seconds < 60 ? Math.max(0, Math.floor(seconds)) + NB + "s" : age(seconds);
}

/** Microseconds as µs, ms or s. */
export function took(us) {
  if (us < 999.5) return Math.round(us) + NB + "µs";
  if (us < 999_500) return significant(us / 1e3) + NB + "ms";
  return significant(us / 1e6) + NB + "s";
}

const two = (n) => String(n).padStart(2, "0");

/** Unix seconds as the reader's wall-clock time. */
export function clock(unixSeconds) {
  return `${minuteClock(unixSeconds)}:${two(new Date(unixSeconds * 1000).getSeconds())}`;
}

export function minuteClock(unixSeconds) {
  const d = new Date(unixSeconds * 1000);
  return `${two(d.getHours())}:${two(d.getMinutes())}`;
}

const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/** The reader's day: "26 Nov". */
export function day(unixSeconds) {
  const d = new Date(unixSeconds * 1000);
  return d.getDate() + NB + MONTHS[d.getMonth()];
}

export function dateTime(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleString();
}

/** Sorted whole numbers with runs joined: [0,1,2,5] → "0–2, 5". */
function runs(numbers) {
  const out = [];
  for (const n of [...numbers].sort((a, b) => a - b)) {
    const last = out[out.length - 1];
    if (last && n <= last[1] + 1) last[1] = Math.max(last[1], n);
    else out.push([n, n]);
  }
  return out.map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`)).join(", ");
}

/** "rank 3", "ranks 0–2, 5". */
export function rankWords(numbers) {
  return `${numbers.length === 1 ? "rank" : "ranks"} ${runs(numbers)}`;
}

/** The server's name for something, as words: "hit_tokens" → "Hit tokens". */
export function words(name) {
  const text = name.replaceAll("_", " ");
  return text.slice(0, 1).toUpperCase() + text.slice(1);
}

export function plural(n, one, many = one + "s") {
  return `${count(n)}${NB}${n === 1 ? one : many}`;
}
