//! How a histogram is shown to a person.

use std::fmt;
use std::time::Duration;

use super::{Bucket, Histogram, scale};

/// The length of the longest bar.
const BAR: u64 = 40;

/// `n 1000 mean 1.20µs min 512ns p50 1.08µs p90 1.98µs p99 3.20µs max 12.50µs`, or `n 0`.
///
/// With `{:#}` a line for each power of two follows, from the lowest to the highest that has a count. Their edges are
/// inclusive below and exclusive above:
///
/// ```text
/// n 4 mean 1.48µs min 512ns p50 1.09µs p90 3.00µs p99 3.00µs max 3.00µs
/// [   512ns,   1.02µs)        1 |********************                    |
/// [  1.02µs,   2.05µs)        2 |****************************************|
/// [  2.05µs,   4.10µs)        1 |********************                    |
/// ```
impl fmt::Display for Histogram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "n {}", self.count())?;
        let values = [
            ("mean", self.mean()),
            ("min", self.min()),
            ("p50", self.quantile(0.5)),
            ("p90", self.quantile(0.9)),
            ("p99", self.quantile(0.99)),
            ("max", self.max()),
        ];
        for (name, value) in values {
            if let Some(value) = value {
                write!(f, " {name} {}", short(value))?;
            }
        }
        if self.overflow > 0 {
            write!(f, " overflow {}", self.overflow)?;
        }
        if f.alternate() { draw(self, f) } else { Ok(()) }
    }
}

/// One line for each power of two.
fn draw(histogram: &Histogram, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let mut rows = [0_u64; 64];
    for Bucket { lower, count, .. } in histogram.buckets() {
        let row = &mut rows[row(lower)];
        *row = row.saturating_add(count);
    }
    let longest = rows.into_iter().fold(histogram.overflow, u64::max);
    let shown = |count: &u64| *count > 0;
    let first = rows.iter().position(shown).unwrap_or(rows.len());
    let end = rows.iter().rposition(shown).map_or(0, |last| last + 1);
    let edge = |nanos| short(Duration::from_nanos(nanos));
    for (row, &count) in rows.iter().enumerate().take(end).skip(first) {
        write!(f, "\n[{:>8}, {:>8})", edge(lowest(row)), edge(lowest(row + 1)))?;
        bar(f, count, longest)?;
    }
    if histogram.overflow > 0 {
        write!(f, "\n[{:>8}, {:>8})", edge(scale::END), "...")?;
        bar(f, histogram.overflow, longest)?;
    }
    Ok(())
}

fn bar(f: &mut fmt::Formatter<'_>, count: u64, longest: u64) -> fmt::Result {
    let length = u128::from(count) * u128::from(BAR) / u128::from(longest.max(1));
    write!(f, " {count:>8} |{:<width$}|", "*".repeat(length as usize), width = BAR as usize)
}

/// 0 has a row of its own, then each power of two. There are fewer than 64: a bucket's edge is less than [`scale::END`].
fn row(lower: Duration) -> usize {
    lower.as_nanos().checked_ilog2().map_or(0, |power| power as usize + 1)
}

/// The lowest value of a row, in nanoseconds.
fn lowest(row: usize) -> u64 {
    if row == 0 { 0 } else { 1 << (row - 1) }
}

/// With two decimals, but whole nanoseconds.
fn short(duration: Duration) -> String {
    if duration < Duration::from_micros(1) { format!("{duration:?}") } else { format!("{duration:.2?}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(nanos: &[u64]) -> Histogram {
        nanos.iter().map(|&nanos| Duration::from_nanos(nanos)).collect()
    }

    /// As it is documented.
    #[test]
    fn shows_lines_and_bars() {
        let histogram = of(&[512, 1_050, 1_360, 3_000]);
        let line = "n 4 mean 1.48µs min 512ns p50 1.09µs p90 3.00µs p99 3.00µs max 3.00µs";
        assert_eq!(histogram.to_string(), line);
        let stars = |n| "*".repeat(n);
        let picture = [
            line.to_owned(),
            format!("[   512ns,   1.02µs)        1 |{:<40}|", stars(20)),
            format!("[  1.02µs,   2.05µs)        2 |{:<40}|", stars(40)),
            format!("[  2.05µs,   4.10µs)        1 |{:<40}|", stars(20)),
        ];
        assert_eq!(format!("{histogram:#}"), picture.join("\n"));
    }

    /// Gaps are drawn, so that the rows are a scale; and so is what is out of it.
    #[test]
    fn shows_gaps_and_overflow() {
        let text = format!("{:#}", of(&[0, 5, scale::END, u64::MAX]));
        let edges: Vec<_> = text.lines().skip(1).map(|line| line.split('|').next().unwrap()).collect();
        let expected = [
            "[     0ns,      1ns)        1 ",
            "[     1ns,      2ns)        0 ",
            "[     2ns,      4ns)        0 ",
            "[     4ns,      8ns)        1 ",
            "[8796.09s,      ...)        2 ",
        ];
        assert_eq!(edges, expected);
        assert!(text.contains(" overflow 2\n"), "{text}");
    }

    /// Nothing is divided by nothing.
    #[test]
    fn shows_nothing() {
        assert_eq!(format!("{:#}", Histogram::new()), "n 0");
    }

    /// The highest bucket, and counts that no bar could have.
    #[test]
    fn shows_extremes() {
        let mut histogram = of(&[scale::END - 1]);
        for _ in 0..70 {
            let copy = histogram.clone();
            histogram.merge(&copy);
        }
        let text = format!("{histogram:#}");
        assert!(text.ends_with(&format!("[4398.05s, 8796.09s) {} |{}|", u64::MAX, "*".repeat(40))), "{text}");
    }
}
