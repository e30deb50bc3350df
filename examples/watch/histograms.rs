//! The histograms that `watch` prints at the end.

use std::fmt;

use dwell::{Bucket, Error, Histogram, LatencyProbe, Name};
use serde_json::{Value, json};

use crate::events::nanos;

/// Those of one span, or of one of its groups.
pub struct SpanHistogram {
    span: Name,
    /// `None`: of all.
    group: Option<String>,
    histogram: Histogram,
}

/// What belongs to no group.
const REST: &str = "rest";

/// All that there is by now.
pub fn of(probe: &LatencyProbe) -> Result<Vec<SpanHistogram>, Error> {
    let mut histograms = Vec::new();
    for info in probe.spans() {
        let span = info.name;
        if info.group_by.is_none() {
            histograms.push(SpanHistogram { span, group: None, histogram: probe.histogram(&span)? });
            continue;
        }
        let groups = probe.groups(&span)?;
        for (key, histogram) in groups.groups {
            histograms.push(SpanHistogram { span, group: Some(key.to_string()), histogram });
        }
        if !groups.rest.is_empty() {
            histograms.push(SpanHistogram { span, group: Some(REST.to_owned()), histogram: groups.rest });
        }
    }
    Ok(histograms)
}

impl SpanHistogram {
    pub fn to_json(&self) -> Value {
        let Self { span, group, histogram } = self;
        let quantile = |q| histogram.quantile(q).map(nanos);
        let bucket = |Bucket { lower, upper, count, .. }| {
            let (lower, upper) = (nanos(lower), nanos(upper));
            json!({ "lower_ns": lower, "upper_ns": upper, "count": count })
        };
        json!({
            "histogram": span.as_str(),
            "group": group,
            "count": histogram.count(),
            "sum_ns": nanos(histogram.sum()),
            "mean_ns": histogram.mean().map(nanos),
            "min_ns": histogram.min().map(nanos),
            "max_ns": histogram.max().map(nanos),
            "quantiles_ns": {
                "0.5": quantile(0.5),
                "0.9": quantile(0.9),
                "0.99": quantile(0.99),
                "0.999": quantile(0.999),
            },
            "overflow": histogram.overflow(),
            // Lower edges belong to their buckets, upper ones don't.
            "buckets": histogram.buckets().map(bucket).collect::<Vec<_>>(),
        })
    }
}

/// `SPAN: n 10 mean ...`, or `SPAN, GROUP: ...`, and a line for each power of two.
impl fmt::Display for SpanHistogram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.span)?;
        if let Some(group) = &self.group {
            write!(f, ", {group}")?;
        }
        write!(f, ": {:#}", self.histogram)
    }
}
