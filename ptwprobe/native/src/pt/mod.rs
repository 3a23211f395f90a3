//! Intel PT packets (Intel SDM volume 3, "Intel Processor Trace").
