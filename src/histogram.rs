//! Counted latencies.

mod picture;
mod scale;

use std::fmt;
use std::time::Duration;

pub(crate) use self::scale::BUCKETS;

/// How many latencies there were of which length.
///
/// **Exact** are [`count`](Self::count), [`sum`](Self::sum) and [`mean`](Self::mean), and with the exceptions below
/// [`min`](Self::min) and [`max`](Self::max). The latencies between are counted in 640 buckets, 16 to each power of
/// two: below 32 ns each nanosecond has its own, above a bucket is at most 6.25 % wide, and so
/// [`quantile`](Self::quantile) is at most that much too high. What takes 2<sup>43</sup> ns (2 h 26 min) or longer is
/// in no bucket but in the [`overflow`](Self::overflow).
///
/// Minimum and maximum may be right to the bucket only: in what [`since`](Self::since) returns; where pairs turned out
/// to be in [doubt](crate::SpanLedger::doubtful); for [groups](crate::Span::grouped_by) other than CPUs, in whose
/// histograms several CPUs count at once; and hardly ever on Linux 5.10, where an interrupt came in between.
///
/// The unit is the nanosecond. Counts stay at `u64::MAX` once they get there.
///
/// It takes 5 KiB wherever it is, and nothing that it does takes memory, but for `clone`, `since` and what is shown.
///
/// ```
/// use std::time::Duration;
/// use dwell::Histogram;
///
/// let histogram: Histogram = (1..=1_000).map(Duration::from_micros).collect();
/// assert_eq!(histogram.count(), 1_000);
/// assert_eq!(histogram.mean(), Some(Duration::from_nanos(500_500)));
/// let p99 = histogram.quantile(0.99).unwrap();
/// assert!(p99 >= Duration::from_micros(990) && p99 < Duration::from_micros(990).mul_f64(1.0625));
/// ```
///
/// Snapshots of one span only ever grow. What came between two of them is their difference:
///
/// ```
/// # use std::time::Duration;
/// # use dwell::Histogram;
/// let earlier: Histogram = [700, 900].map(Duration::from_nanos).into_iter().collect();
/// let mut later = earlier.clone();
/// later.record(Duration::from_nanos(800));
///
/// let between = later.since(&earlier);
/// assert_eq!((between.count(), between.sum()), (1, Duration::from_nanos(800)));
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Histogram {
    counts: Box<[u64; BUCKETS]>,
    overflow: u64,
    /// In nanoseconds, as all that follows. A span may sum up to more than 2^64 of them.
    sum: u128,
    /// `u64::MAX` if there is nothing; else at most `max`, and in the lowest bucket that has a count.
    min: u64,
    /// 0 if there is nothing; else in the highest bucket that has a count, or in the overflow.
    max: u64,
}

/// A range of latencies, and how many fell into it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Bucket {
    /// The lowest latency that belongs to it.
    pub lower: Duration,
    /// The lowest latency that is too long for it: the next bucket's `lower`.
    pub upper: Duration,
    /// Latencies in it.
    pub count: u64,
}

impl Histogram {
    /// An empty one.
    pub fn new() -> Self {
        Self { counts: Box::new([0; BUCKETS]), overflow: 0, sum: 0, min: u64::MAX, max: 0 }
    }

    /// Adds a latency. One above `u64::MAX` ns (584 years) counts as that.
    pub fn record(&mut self, latency: Duration) {
        let nanos = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        let count = match scale::index(nanos) {
            Some(index) => &mut self.counts[index],
            None => &mut self.overflow,
        };
        *count = count.saturating_add(1);
        self.sum = self.sum.saturating_add(u128::from(nanos));
        self.min = self.min.min(nanos);
        self.max = self.max.max(nanos);
    }

    /// Latencies in it, the overflow included.
    pub fn count(&self) -> u64 {
        self.counts.iter().fold(self.overflow, |sum, &count| sum.saturating_add(count))
    }

    /// Whether there is no latency in it.
    pub fn is_empty(&self) -> bool {
        self.overflow == 0 && self.counts.iter().all(|&count| count == 0)
    }

    /// All latencies together, the overflow included.
    pub fn sum(&self) -> Duration {
        duration(self.sum)
    }

    /// The shortest latency; `None` if there is none. Exact, with the exceptions that [`Histogram`] names.
    pub fn min(&self) -> Option<Duration> {
        (!self.is_empty()).then(|| Duration::from_nanos(self.min))
    }

    /// The longest latency, the overflow included; `None` if there is none. Exact, with the exceptions that
    /// [`Histogram`] names.
    pub fn max(&self) -> Option<Duration> {
        (!self.is_empty()).then(|| Duration::from_nanos(self.max))
    }

    /// The arithmetic mean, rounded down to whole nanoseconds; `None` if there is no latency.
    pub fn mean(&self) -> Option<Duration> {
        self.sum.checked_div(u128::from(self.count())).map(duration)
    }

    /// The latency that the share `q` of all latencies doesn't exceed: `quantile(0.5)` is the median, `quantile(0.99)`
    /// the 99th percentile. `None` if there is no latency, or if `q` is NaN; less than 0 counts as 0, more than 1 as 1.
    ///
    /// It is the highest latency of the bucket in which the one with the rank `q * count`, rounded up, lies, and so at
    /// most 6.25 % above that; but never more than [`max`](Self::max) or less than [`min`](Self::min). Of the overflow
    /// only the maximum is known. `quantile(0.0)` is the minimum, and `quantile(1.0)` the maximum.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use dwell::Histogram;
    /// let histogram: Histogram = [10, 20, 1_000].map(Duration::from_nanos).into_iter().collect();
    /// let nanos = |q| histogram.quantile(q).unwrap().as_nanos();
    /// assert_eq!([nanos(0.0), nanos(0.5), nanos(0.99), nanos(1.0)], [10, 20, 1_000, 1_000]);
    /// assert_eq!(Histogram::new().quantile(0.5), None);
    /// ```
    pub fn quantile(&self, q: f64) -> Option<Duration> {
        let count = self.count();
        if count == 0 || q.is_nan() {
            return None;
        }
        if q <= 0.0 {
            return Some(Duration::from_nanos(self.min));
        }
        // What the multiplication adds to a whole number is no reason to take the next: 0.07 * 100.0 > 7.0.
        let rank = q.min(1.0) * count as f64;
        let rank = (rank - rank * f64::EPSILON).ceil() as u64;
        let nanos = if q >= 1.0 { self.max } else { self.of_rank(rank.clamp(1, count)) };
        Some(Duration::from_nanos(nanos))
    }

    /// The highest value of the bucket that holds this rank; ranks begin at 1.
    fn of_rank(&self, rank: u64) -> u64 {
        let mut reached = 0_u64;
        let bucket = self.counts.iter().position(|&count| {
            reached = reached.saturating_add(count);
            reached >= rank
        });
        bucket.map_or(self.max, |bucket| (scale::upper(bucket) - 1).min(self.max).max(self.min))
    }

    /// The buckets that have a count, from the lowest on. The overflow isn't among them.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use dwell::Histogram;
    /// let histogram: Histogram = [5, 1_000, 1_001].map(Duration::from_nanos).into_iter().collect();
    /// let buckets: Vec<_> = histogram.buckets().map(|bucket| (bucket.lower, bucket.upper, bucket.count)).collect();
    /// let nanos = Duration::from_nanos;
    /// assert_eq!(buckets, [(nanos(5), nanos(6), 1), (nanos(992), nanos(1_024), 2)]);
    /// ```
    pub fn buckets(&self) -> impl Iterator<Item = Bucket> {
        let bucket = |(index, &count)| Bucket {
            lower: Duration::from_nanos(scale::lower(index)),
            upper: Duration::from_nanos(scale::upper(index)),
            count,
        };
        self.counts.iter().enumerate().filter(|(_, count)| **count > 0).map(bucket)
    }

    /// Latencies of 2<sup>43</sup> ns (2 h 26 min) or more, which have no bucket.
    pub fn overflow(&self) -> u64 {
        self.overflow
    }

    /// Adds all that is in another. The result is what recording the latencies of both would have given.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use dwell::Histogram;
    /// let mut all: Histogram = [Duration::from_nanos(700)].into_iter().collect();
    /// all.merge(&[Duration::from_nanos(100)].into_iter().collect());
    /// assert_eq!((all.count(), all.min()), (2, Some(Duration::from_nanos(100))));
    /// ```
    pub fn merge(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(other.counts.iter()) {
            *count = count.saturating_add(*more);
        }
        self.overflow = self.overflow.saturating_add(other.overflow);
        self.sum = self.sum.saturating_add(other.sum);
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
    }

    /// What has come since an earlier snapshot of the same span: the difference of the two. Nothing becomes negative, so
    /// with two that aren't of the same span the result means nothing, and that is all.
    ///
    /// Counts and sum are exact. The minimum is, too, if it is lower than the earlier one. If not, what is known is the
    /// lowest bucket that has a count now: the result's minimum is that bucket's lower edge, or this snapshot's minimum,
    /// whichever is higher. The same goes for the maximum, with the highest latency of the highest bucket; in the
    /// overflow, it is this snapshot's.
    pub fn since(&self, earlier: &Self) -> Self {
        let mut between = Self::new();
        let pairs = self.counts.iter().zip(earlier.counts.iter());
        for (count, (later, earlier)) in between.counts.iter_mut().zip(pairs) {
            *count = later.saturating_sub(*earlier);
        }
        between.overflow = self.overflow.saturating_sub(earlier.overflow);
        between.sum = self.sum.saturating_sub(earlier.sum);
        if let Some(((lowest, _), (_, highest))) = between.ends() {
            let set_since = self.min < earlier.min;
            between.min = if set_since { self.min } else { lowest.max(self.min) };
            let set_since = self.max > earlier.max;
            between.max = if set_since { self.max } else { highest.min(self.max) };
            between.bound();
        }
        between
    }

    /// Adds one CPU's `struct dwell_histogram` as the words that it is made of: sum, max, min, overflow, and the
    /// buckets. Missing ones are 0, and what is behind doesn't count.
    ///
    /// The kernel goes on counting while it is read, so what belongs to one latency may be there in part. The buckets
    /// are what counts, and the extremes follow them.
    pub(crate) fn add_raw(&mut self, words: &[u64]) {
        let mut words = words.iter().copied();
        let mut next = || words.next().unwrap_or(0);
        let mut one = Self::new();
        one.sum = u128::from(next());
        one.max = next();
        one.min = next();
        one.overflow = next();
        one.counts.fill_with(next);
        one.bound();
        self.merge(&one);
    }

    /// The lowest and the highest value of the lowest, and of the highest, bucket that has a count. The overflow is one.
    fn ends(&self) -> Option<((u64, u64), (u64, u64))> {
        let edges = |index| (scale::lower(index), scale::upper(index) - 1);
        let overflow = (self.overflow > 0).then_some((scale::END, u64::MAX));
        let lowest = self.counts.iter().position(|&count| count > 0).map(edges).or(overflow)?;
        let highest = overflow.or(self.counts.iter().rposition(|&count| count > 0).map(edges))?;
        Some((lowest, highest))
    }

    /// Brings minimum and maximum to where the counts say that they are.
    fn bound(&mut self) {
        let Some((lowest, highest)) = self.ends() else {
            (self.sum, self.min, self.max) = (0, u64::MAX, 0);
            return;
        };
        let min = self.min.clamp(lowest.0, lowest.1);
        let max = self.max.clamp(highest.0, highest.1);
        // In one bucket they may have come the wrong way round.
        (self.min, self.max) = (min.min(max), min.max(max));
    }
}

/// `Duration::MAX` for more than it can hold.
fn duration(nanos: u128) -> Duration {
    const SECOND: u128 = 1_000_000_000;
    match u64::try_from(nanos / SECOND) {
        Ok(seconds) => Duration::new(seconds, (nanos % SECOND) as u32),
        Err(_) => Duration::MAX,
    }
}

/// An empty one.
impl Default for Histogram {
    fn default() -> Self {
        Self::new()
    }
}

/// Without the buckets; those are in `{:#}` of its `Display`.
impl fmt::Debug for Histogram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Histogram")
            .field("count", &self.count())
            .field("sum", &self.sum())
            .field("min", &self.min())
            .field("max", &self.max())
            .field("overflow", &self.overflow)
            .finish_non_exhaustive()
    }
}

impl Extend<Duration> for Histogram {
    fn extend<I: IntoIterator<Item = Duration>>(&mut self, latencies: I) {
        for latency in latencies {
            self.record(latency);
        }
    }
}

impl FromIterator<Duration> for Histogram {
    fn from_iter<I: IntoIterator<Item = Duration>>(latencies: I) -> Self {
        let mut histogram = Self::new();
        histogram.extend(latencies);
        histogram
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of one CPU's `struct dwell_histogram`.
    const WORDS: usize = 4 + BUCKETS;

    fn of(nanos: &[u64]) -> Histogram {
        nanos.iter().map(|&nanos| Duration::from_nanos(nanos)).collect()
    }

    fn nanos(duration: Option<Duration>) -> u64 {
        duration.unwrap().as_nanos() as u64
    }

    /// xorshift64*, so that a failure can be repeated.
    fn random() -> impl FnMut() -> u64 {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        move || {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            state.wrapping_mul(0x2545_f491_4f6c_dd1d)
        }
    }

    /// Values of all magnitudes: a random number of random bits.
    fn some_values(next: &mut impl FnMut() -> u64, bits: u64) -> Vec<u64> {
        (0..next() % 500 + 1).map(|_| next() >> (63 - next() % bits)).collect()
    }

    /// What the kernel would have written for these.
    fn words(values: &[u64]) -> Vec<u64> {
        let mut words = vec![0; WORDS];
        words[2] = u64::MAX;
        for &value in values {
            words[0] += value;
            words[1] = words[1].max(value);
            words[2] = words[2].min(value);
            words[scale::index(value).map_or(3, |index| 4 + index)] += 1;
        }
        words
    }

    /// What has to hold whatever went into it.
    fn check(histogram: &Histogram) {
        let total: u128 =
            histogram.buckets().map(|bucket| u128::from(bucket.count)).sum::<u128>() + u128::from(histogram.overflow());
        assert_eq!(u128::from(histogram.count()), total.min(u128::from(u64::MAX)));
        assert_eq!(histogram.is_empty(), total == 0);
        let all = [histogram.min(), histogram.quantile(0.5), histogram.max(), histogram.mean()];
        assert!(all.iter().all(|value| value.is_some() != histogram.is_empty()), "{all:?}");
        let mut last = histogram.min();
        for percent in 0..=100 {
            let quantile = histogram.quantile(f64::from(percent) / 100.0);
            assert!(quantile >= last && quantile <= histogram.max(), "{percent} % of {histogram:?}");
            last = quantile;
        }
        assert_eq!(last, histogram.max());
        assert!(format!("{histogram:#}").starts_with(&format!("n {}", histogram.count())));
    }

    /// Each quantile against the sorted values themselves.
    #[test]
    fn quantiles_of_random_values() {
        let mut next = random();
        for _ in 0..300 {
            let mut values = some_values(&mut next, 43);
            let histogram = of(&values);
            values.sort_unstable();
            let count = values.len();
            assert_eq!(histogram.count(), count as u64);
            assert_eq!(histogram.sum().as_nanos(), values.iter().map(|&value| u128::from(value)).sum());
            assert_eq!((nanos(histogram.min()), nanos(histogram.max())), (values[0], values[count - 1]));
            for rank in 1..=count {
                let value = values[rank - 1];
                let quantile = nanos(histogram.quantile(rank as f64 / count as f64));
                assert!(
                    quantile >= value && quantile <= value + value / 16,
                    "{rank} of {count}: {quantile} for {value}"
                );
            }
            check(&histogram);
        }
    }

    /// A rank that is a whole number is that one, however the product of its factors is rounded.
    #[test]
    fn ranks_are_not_rounded_up_twice() {
        let histogram: Histogram = (0..32).map(Duration::from_nanos).collect();
        assert_eq!(nanos(histogram.quantile(0.5)), 15);
        assert_eq!(nanos(histogram.quantile(0.500_001)), 16);
        let values: Vec<_> = (1..=100).map(|rank| if rank <= 7 { 1 } else { 2 }).collect();
        // 0.07 * 100.0 is more than 7.0.
        assert_eq!(nanos(of(&values).quantile(0.07)), 1);
    }

    /// What isn't between 0 and 1.
    #[test]
    fn quantiles_of_any_number() {
        let histogram = of(&[1_000, 1_001, 5_000]);
        assert_eq!(nanos(histogram.quantile(0.01)), 1_023);
        for q in [0.0, -0.0, -1.0, f64::NEG_INFINITY] {
            assert_eq!(nanos(histogram.quantile(q)), 1_000, "{q}");
        }
        for q in [1.0, 1.1, f64::INFINITY] {
            assert_eq!(nanos(histogram.quantile(q)), 5_000, "{q}");
        }
        assert_eq!(nanos(histogram.quantile(f64::MIN_POSITIVE)), 1_023);
        assert_eq!(histogram.quantile(f64::NAN), None);
    }

    /// All that can be asked of nothing.
    #[test]
    fn empty() {
        let histogram = Histogram::default();
        check(&histogram);
        assert_eq!((histogram.count(), histogram.sum(), histogram.overflow()), (0, Duration::ZERO, 0));
        assert_eq!((histogram.min(), histogram.max(), histogram.mean()), (None, None, None));
        assert_eq!(histogram.since(&histogram), histogram);
        let mut merged = of(&[7]);
        merged.merge(&histogram);
        assert_eq!(merged, of(&[7]));
        assert!(of(&[7]).since(&of(&[7])).is_empty());
    }

    /// Latencies up to a limit, as Prometheus' `le` counts them: with the limit, and without what is above it.
    #[test]
    fn up_to_a_limit() {
        fn up_to(histogram: &Histogram, limit: u64) -> u64 {
            // The last latency of a bucket is one less than its upper edge.
            let within = |bucket: &Bucket| bucket.upper <= Duration::from_nanos(limit + 1);
            histogram.buckets().filter(within).map(|bucket| bucket.count).sum()
        }
        let nine: Histogram = (0..=8).map(Duration::from_nanos).collect();
        assert_eq!([0, 1, 2, 4, 8].map(|limit| up_to(&nine, limit)), [1, 2, 3, 5, 9]);
        assert_eq!((nine.count(), nine.overflow()), (9, 0));
        // Where several share a bucket it counts from its last one on.
        let one = of(&[268]);
        assert_eq!([255, 267, 268, 270, 271, 272, 1_023].map(|limit| up_to(&one, limit)), [0, 0, 0, 0, 1, 1, 1]);
        let bucket = one.buckets().next().unwrap();
        assert_eq!((bucket.lower.as_nanos(), bucket.upper.as_nanos()), (256, 272));
    }

    /// Zero and one aren't the same, nor is anything below 32.
    #[test]
    fn small_values() {
        let buckets = |histogram: &Histogram| {
            let buckets = histogram.buckets();
            let buckets = buckets.map(|bucket| (bucket.lower.as_nanos(), bucket.upper.as_nanos(), bucket.count));
            buckets.collect::<Vec<_>>()
        };
        let histogram = of(&[0, 0, 1, 2, 3, 4]);
        assert_eq!(buckets(&histogram), [(0, 1, 2), (1, 2, 1), (2, 3, 1), (3, 4, 1), (4, 5, 1)]);
        assert_eq!((nanos(histogram.min()), nanos(histogram.max()), histogram.count()), (0, 4, 6));
    }

    /// Differences of counts that have outgrown 32 bits.
    #[test]
    fn counts_are_64_bit() {
        let long_run = |calls: u64| {
            let mut words = vec![0; WORDS];
            (words[0], words[1], words[2]) = (1_000 * calls, 1_000, 1_000);
            (words[3], words[4 + 111]) = (calls, calls);
            let mut histogram = Histogram::new();
            histogram.add_raw(&words);
            histogram
        };
        let (earlier, later) = (long_run((1 << 32) - 3), long_run((1 << 32) + 5));
        let between = later.since(&earlier);
        assert_eq!((between.count(), between.overflow(), between.sum()), (16, 8, Duration::from_micros(8)));
        assert_eq!(later.since(&Histogram::new()).count(), 2 * ((1 << 32) + 5));
    }

    /// What is too long for any bucket is counted, and is in everything else.
    #[test]
    fn overflow_counts() {
        let long = [1 << 43, 1 << 50, u64::MAX];
        let mut histogram = of(&long);
        histogram.record(Duration::from_nanos((1 << 43) - 1));
        histogram.record(Duration::MAX);
        check(&histogram);
        assert_eq!((histogram.count(), histogram.overflow(), histogram.buckets().count()), (5, 4, 1));
        let sum = 2 * u128::from(u64::MAX) + (1 << 50) + (1 << 43) + ((1 << 43) - 1);
        assert_eq!(histogram.sum().as_nanos(), sum);
        assert_eq!((nanos(histogram.min()), nanos(histogram.max())), ((1 << 43) - 1, u64::MAX));
        assert_eq!((nanos(histogram.quantile(0.2)), nanos(histogram.quantile(0.21))), ((1 << 43) - 1, u64::MAX));
        assert_eq!(nanos(of(&long).min()), 1 << 43);
    }

    /// Merging is the same as recording everything.
    #[test]
    fn merge_is_recording_all() {
        let mut next = random();
        for _ in 0..300 {
            let (one, other) = (some_values(&mut next, 64), some_values(&mut next, 64));
            let mut merged = of(&one);
            merged.merge(&of(&other));
            assert_eq!(merged, of(&[one, other].concat()));
            check(&merged);
        }
    }

    /// Earlier and since make later; the extremes of the difference are within a bucket, and exact if they are new.
    #[test]
    fn since_is_the_difference() {
        let mut next = random();
        for _ in 0..300 {
            let (before, new) = (some_values(&mut next, 64), some_values(&mut next, 64));
            let earlier = of(&before);
            let later = of(&[before, new.clone()].concat());
            let between = later.since(&earlier);
            check(&between);
            let exact = of(&new);
            assert_eq!((between.counts.as_ref(), between.sum()), (exact.counts.as_ref(), exact.sum()));
            assert_eq!(between.overflow(), exact.overflow());
            assert_eq!(scale::index(between.min), scale::index(exact.min));
            assert_eq!(scale::index(between.max), scale::index(exact.max));
            assert!(between.min <= exact.min && between.max >= exact.max);
            if exact.min < earlier.min {
                assert_eq!(between.min, exact.min);
            }
            if exact.max > earlier.max {
                assert_eq!(between.max, exact.max);
            }
            let mut whole = between.clone();
            whole.merge(&earlier);
            assert_eq!(whole, later);
            assert_eq!(later.since(&Histogram::new()), later);
        }
    }

    /// Two that have nothing to do with each other, and in the wrong order.
    #[test]
    fn since_takes_any_two() {
        let mut next = random();
        for _ in 0..300 {
            let (one, other) = (of(&some_values(&mut next, 64)), of(&some_values(&mut next, 64)));
            check(&one.since(&other));
            check(&other.since(&one));
        }
    }

    /// What CPUs have counted adds up to what they would have counted together.
    #[test]
    fn adds_the_kernels_words() {
        let mut next = random();
        for _ in 0..300 {
            // Less than 500 of 2^54 don't exceed a word.
            let cpus: Vec<_> = (0..3).map(|_| some_values(&mut next, 54)).collect();
            let mut histogram = Histogram::new();
            for values in &cpus {
                histogram.add_raw(&words(values));
            }
            assert_eq!(histogram, of(&cpus.concat()));
            // A CPU that has never run.
            histogram.add_raw(&[0; WORDS]);
            histogram.add_raw(&[]);
            assert_eq!(histogram, of(&cpus.concat()));
        }
    }

    /// Whatever of a latency has been written when it is read, the extremes are in its bucket.
    #[test]
    fn adds_what_is_half_written() {
        for written in 0..8_u32 {
            let mut half = words(&[1_000, 3_000]);
            for (index, value) in words(&[500, 1_000, 3_000, 9_000]).into_iter().enumerate() {
                let group = index.min(3);
                // The buckets are there, sum, max and min not yet or already.
                if group == 3 || written & 1 << group != 0 {
                    half[index] = value;
                }
            }
            let mut histogram = Histogram::new();
            histogram.add_raw(&half);
            check(&histogram);
            assert_eq!(histogram.count(), 4);
            assert_eq!(scale::index(histogram.min), scale::index(500));
            assert_eq!(scale::index(histogram.max), scale::index(9_000));
            // Extremes that have no count yet are none.
            half[4..].copy_from_slice(&words(&[1_000, 3_000])[4..]);
            let mut histogram = Histogram::new();
            histogram.add_raw(&half);
            check(&histogram);
            assert!(histogram.min >= scale::lower(scale::index(1_000).unwrap()));
            assert!(histogram.max < scale::upper(scale::index(3_000).unwrap()));
        }
        // The very first one: there is a count, and nothing else.
        let mut first = [0; WORDS];
        (first[2], first[4 + 111]) = (u64::MAX, 1);
        let mut histogram = Histogram::new();
        histogram.add_raw(&first);
        check(&histogram);
        assert_eq!((histogram.min, histogram.max), (992, 1_023));
    }

    /// Thousands of arrays of random words: a histogram of which everything can be asked, never a panic.
    #[test]
    fn takes_any_words() {
        let mut next = random();
        let mut words = [0; WORDS + 1];
        for round in 0..4_000 {
            let bits = next() % 64;
            // Few buckets or all of them, so that counts come to their limit in some and are sparse in others.
            let sparse = 1 << (round % 12);
            for (index, word) in words.iter_mut().enumerate() {
                *word = if index < 4 || next() % sparse == 0 { next() >> bits } else { 0 };
            }
            let mut histogram = Histogram::new();
            histogram.add_raw(&words[..next() as usize % (words.len() + 1)]);
            check(&histogram);
            let earlier = histogram.clone();
            histogram.add_raw(&words);
            check(&histogram);
            check(&histogram.since(&earlier));
            check(&earlier.since(&histogram));
        }
        let mut all = Histogram::new();
        all.add_raw(&[u64::MAX; WORDS]);
        check(&all);
        assert_eq!((all.min, all.max, all.count()), (0, u64::MAX, u64::MAX));
    }

    /// Sums beyond what a `Duration` holds end there.
    #[test]
    fn durations() {
        assert_eq!(duration(u128::MAX), Duration::MAX);
        assert_eq!(duration(Duration::MAX.as_nanos()), Duration::MAX);
        assert_eq!(duration(1_000_000_001), Duration::new(1, 1));
    }

    /// 640 counts aren't what anybody wants to see of it.
    #[test]
    fn debug_is_short() {
        let text = format!("{:?}", of(&[1_500, 2_500]));
        let expected = "Histogram { count: 2, sum: 4µs, min: Some(1.5µs), max: Some(2.5µs), overflow: 0, .. }";
        assert_eq!(text, expected);
    }
}
