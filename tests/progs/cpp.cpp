// c++: -O1 -g
// A C++ target: overloads, a template, a method and a namespace, all kept out of line; deterministic work and output.
//
//     cpp N
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#define KEPT __attribute__((noinline, noclone))

namespace shop {

KEPT int64_t add(int64_t a, int64_t b)
{
    return a + b;
}

KEPT double add(double a, double b)
{
    return a + b;
}

template <typename T> KEPT T fold(const std::vector<T> &values, T start)
{
    for (const T &v : values)
        start = add(start, v);
    return start;
}

class Basket {
    std::vector<int64_t> prices;

public:
    KEPT void put(int64_t price, int count)
    {
        for (int i = 0; i < count; i++)
            prices.push_back(price);
    }
    KEPT int64_t total() const
    {
        return fold<int64_t>(prices, 0);
    }
};

} // namespace shop

int main(int argc, char **argv)
{
    int n = argc > 1 ? std::atoi(argv[1]) : 1000;
    shop::Basket basket;
    for (int i = 0; i < n; i++)
        basket.put(i * 7 % 101, i % 3);
    std::vector<double> halves(n, 0.5);
    std::cout << "total=" << basket.total() << " halves=" << shop::fold<double>(halves, 0.0) << std::endl;
}
